//! GGUF headers: written here by hand, read back, cut and changed.

use infercluster_inventory::gguf::{self, GgufError, TENSOR_TYPES, card, load_card, part_paths, read};
use proptest::prelude::*;

/// Writes a header; what a test breaks, it breaks in the bytes.
#[derive(Debug, Clone, Default)]
struct Writer {
    entries: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: u64,
}

fn text(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.bytes());
    bytes
}

impl Writer {
    fn entry(mut self, key: &str, type_id: u32, value: &[u8]) -> Self {
        self.entries
            .push([&text(key)[..], &type_id.to_le_bytes(), value].concat());
        self
    }

    fn string(self, key: &str, value: &str) -> Self {
        let value = text(value);
        self.entry(key, 8, &value)
    }

    fn count(self, key: &str, value: u32) -> Self {
        self.entry(key, 4, &value.to_le_bytes())
    }

    fn list(self, key: &str, values: &[u32]) -> Self {
        let mut bytes = 4_u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        self.entry(key, 9, &bytes)
    }

    fn tokens(self, count: usize) -> Self {
        let mut bytes = 8_u32.to_le_bytes().to_vec();
        bytes.extend((count as u64).to_le_bytes());
        (0..count).for_each(|token| bytes.extend(text(&format!("<{token}>"))));
        self.entry("tokenizer.ggml.tokens", 9, &bytes)
    }

    fn tensor(mut self, name: &str, shape: &[u64], type_id: u32) -> Self {
        let known = gguf::tensor_type(type_id).unwrap();
        let mut bytes = text(name);
        bytes.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|side| bytes.extend(side.to_le_bytes()));
        bytes.extend(type_id.to_le_bytes());
        bytes.extend(self.data.to_le_bytes());
        self.data += (shape.iter().product::<u64>() / known.block * known.bytes).next_multiple_of(32);
        self.tensors.push(bytes);
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.entries.len() as u64).to_le_bytes());
        bytes.extend(self.entries.concat());
        bytes.extend(self.tensors.concat());
        bytes
    }
}

fn tiny() -> Writer {
    Writer::default()
        .string("general.architecture", "llama")
        .string("general.name", "Tiny")
        .count("general.file_type", 15)
        .count("llama.block_count", 2)
        .count("llama.embedding_length", 256)
        .count("llama.feed_forward_length", 512)
        .count("llama.attention.head_count", 4)
        .count("llama.attention.head_count_kv", 2)
        .count("llama.context_length", 2048)
        .tokens(100)
        .tensor("token_embd.weight", &[256, 100], 14)
        .tensor("blk.0.attn_q.weight", &[256, 256], 12)
        .tensor("output_norm.weight", &[256], 0)
}

#[test]
fn a_header_becomes_a_card() {
    let header = read("tiny.gguf", tiny().bytes().as_slice()).unwrap();
    let found = card("file", &[header]);
    let card = &found.card;
    assert_eq!(
        (card.name.as_str(), card.model_type.as_deref()),
        ("Tiny", Some("llama"))
    );
    assert_eq!(
        (card.layers, card.hidden, card.ffn),
        (Some(2), Some(256), Some(512))
    );
    assert_eq!(
        (card.heads, card.kv_heads, card.head_dim),
        (Some(4), Some(2), Some(64))
    );
    assert_eq!((card.vocab, card.tied_embeddings), (Some(100), Some(true)));
    assert_eq!(card.params, Some(25_600 + 65_536 + 256));
    // 210 bytes for 256 numbers of Q6_K, 144 of Q4_K.
    assert_eq!(card.weight_bytes, Some(100 * 210 + 256 * 144 + 1024));
    assert_eq!(card.kv_bytes_per_token, Some(2 * 2 * 2 * 64 * 2));
    assert_eq!((card.quantisation.as_deref(), card.dtype), (Some("Q4_K_M"), None));
    assert_eq!((found.tensors, found.tensor_types["Q4_K"]), (3, 1));
}

#[test]
fn layers_without_attention_and_idle_experts_are_left_out() {
    let header = Writer::default()
        .string("general.architecture", "hybrid")
        .count("hybrid.block_count", 4)
        .count("hybrid.embedding_length", 64)
        .count("hybrid.attention.head_count", 4)
        .list("hybrid.attention.head_count_kv", &[0, 2, 0, 4])
        .count("hybrid.expert_count", 8)
        .count("hybrid.expert_used_count", 2)
        .tensor("blk.0.ffn_up_exps.weight", &[64, 32, 8], 1)
        .tensor("output.weight", &[64, 10], 1)
        .bytes();
    let found = card("file", &[read("h.gguf", header.as_slice()).unwrap()]);
    assert_eq!(
        (found.card.attention_layers, found.card.kv_heads),
        (Some(2), None)
    );
    assert_eq!(found.card.kv_bytes_per_token, Some(2 * (2 + 4) * 16 * 2));
    assert_eq!(found.card.params, Some(64 * 32 * 8 + 640));
    assert_eq!(found.card.active_params, Some(64 * 32 * 2 + 640));
}

#[test]
fn every_type_takes_the_bytes_of_its_blocks() {
    // Bits a number, as the public descriptions of the types round them.
    for (name, bits) in [
        ("Q4_0", 4.5),
        ("Q8_0", 8.5),
        ("Q2_K", 2.625),
        ("Q4_K", 4.5),
        ("Q6_K", 6.5625),
        ("IQ2_XXS", 2.0625),
        ("IQ4_XS", 4.25),
        ("IQ1_S", 1.5625),
        ("MXFP4", 4.25),
        ("NVFP4", 4.5),
        ("BF16", 16.0),
    ] {
        let known = TENSOR_TYPES.iter().find(|known| known.name == name).unwrap();
        assert_eq!(8.0 * known.bytes as f64 / known.block as f64, bits, "{name}");
    }
    for known in TENSOR_TYPES {
        let bytes = Writer::default()
            .tensor("t", &[4 * known.block, 3], known.id)
            .bytes();
        let header = read("t.gguf", bytes.as_slice()).unwrap();
        assert_eq!(header.tensors[0].bytes, Some(12 * known.bytes), "{}", known.name);
    }
}

#[test]
fn models_in_several_files_are_read_together_or_say_what_is_missing() {
    let folder = std::env::temp_dir().join(format!("gguf-parts-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let part = |number: u32, writer: Writer| {
        let writer = writer.count("split.count", 2).count("split.no", number);
        std::fs::write(
            folder.join(format!("m-{:05}-of-00002.gguf", number + 1)),
            writer.bytes(),
        )
        .unwrap();
    };
    part(0, tiny());
    let first = folder.join("m-00001-of-00002.gguf");
    let alone = load_card(&first).unwrap();
    assert_eq!((alone.card.params, alone.parts, alone.parts_read), (None, 2, 1));
    assert!(alone.card.reason.unwrap().contains("1 of 2 files"));
    part(1, Writer::default().tensor("blk.1.attn_q.weight", &[256, 256], 1));
    let both = load_card(&first).unwrap();
    assert_eq!(
        (both.card.params, both.parts_read),
        (Some(25_600 + 65_536 + 256 + 65_536), 2)
    );
    // Only headers were written, which a card says.
    assert!(
        both.card.notes.iter().any(|note| note.contains("missing")),
        "{:?}",
        both.card.notes
    );
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(part_paths("m.gguf".as_ref(), 2), None);
    assert_eq!(part_paths("m-00001-of-00002.gguf".as_ref(), 3), None);
    assert_eq!(
        part_paths("m-1-of-99999999999.gguf".as_ref(), 99_999_999_999),
        None
    );
}

#[test]
fn what_cannot_be_is_refused_by_place() {
    let refuse = |bytes: &[u8], part: &str| {
        let error = read("bad.gguf", bytes).unwrap_err();
        let message = error.to_string();
        assert!(
            message.starts_with("bad.gguf") && message.contains(part),
            "{message} should hold {part}"
        );
        error
    };
    refuse(b"", "in the middle of");
    refuse(b"ggml", "\"ggml\"");
    refuse(b"GGUF\x09\0\0\0", "version 9");
    refuse(b"GGUF\0\0\0\x03", "little-endian");
    let good = tiny().bytes();
    let huge = |at: usize| {
        let mut bytes = good.clone();
        bytes[at..at + 8].copy_from_slice(&(1_u64 << 60).to_le_bytes());
        bytes
    };
    refuse(&huge(8), "number of tensors");
    refuse(&huge(16), "metadata entries");
    refuse(&huge(24), "length of a metadata key");
    // A text and a list that claim more than the file has.
    let value = 24 + text("general.architecture").len() + 4;
    refuse(&huge(value), "general.architecture");
    let list = Writer::default().tokens(3).bytes();
    let at = 24 + text("tokenizer.ggml.tokens").len() + 8;
    let mut lying = list;
    lying[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    refuse(&lying, "tokenizer.ggml.tokens");
    let mut numbers = Writer::default().list("n", &[1, 2, 3]).bytes();
    let at = 24 + text("n").len() + 8;
    numbers[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    refuse(&numbers, "`n`");
    let twice = tiny().tensor("output_norm.weight", &[256], 0).bytes();
    refuse(&twice, "twice");
    refuse(&tiny().count("general.name", 1).bytes(), "second time");
    refuse(&tiny().count("general.alignment", 3).bytes(), "power of two");
    refuse(&Writer::default().entry("x", 99, &[]).bytes(), "from 0 to 12");
    let mut sides = Writer::default().tensor("t", &[1, 1], 0).bytes();
    let at = 24 + text("t").len();
    sides[at..at + 4].copy_from_slice(&99_u32.to_le_bytes());
    refuse(&sides, "99 sides");
    let mut large = Writer::default().tensor("t", &[1, 1], 0).bytes();
    large[at + 4..at + 12].copy_from_slice(&(1_u64 << 60).to_le_bytes());
    refuse(&large, "more numbers");
    let mut uneven = Writer::default().tensor("t", &[32, 1], 2).bytes();
    uneven[at + 4..at + 12].copy_from_slice(&33_u64.to_le_bytes());
    refuse(&uneven, "multiple");
    let mut shifted = Writer::default().tensor("t", &[32, 1], 2).bytes();
    let end = shifted.len();
    shifted[end - 8..].copy_from_slice(&7_u64.to_le_bytes());
    refuse(&shifted, "alignment");
    shifted[end - 8..].copy_from_slice(&(u64::MAX - 31).to_le_bytes());
    assert!(
        read("far.gguf", shifted.as_slice()).is_ok()
            || matches!(refuse(&shifted, "past"), GgufError::Tensor { .. })
    );
    let overlap = Writer {
        data: 0,
        ..Writer::default().tensor("a", &[64], 0)
    };
    refuse(
        &overlap.tensor("b", &[64], 0).bytes(),
        "inside the tensor before it",
    );
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        counts in proptest::collection::vec(any::<u32>(), 0..6),
        layers in proptest::collection::vec(0_u32..64, 0..20),
        shapes in proptest::collection::vec((1_u64..40, 1_u64..40, 0_usize..TENSOR_TYPES.len()), 0..8),
    ) {
        let mut writer = Writer::default().string("general.architecture", "x").list("x.list", &layers);
        for (number, count) in counts.iter().enumerate() {
            writer = writer.count(&format!("x.count{number}"), *count);
        }
        for (number, (rows, columns, kind)) in shapes.iter().enumerate() {
            let known = TENSOR_TYPES[*kind];
            writer = writer.tensor(&format!("t{number}"), &[columns * known.block, *rows], known.id);
        }
        let header = read("x.gguf", writer.bytes().as_slice()).unwrap();
        for (number, count) in counts.iter().enumerate() {
            prop_assert_eq!(header.count(&format!("x.count{number}")), Some(u64::from(*count)));
        }
        let elements: u64 = header.tensors.iter().map(|tensor| tensor.elements).sum();
        let expected: u64 = shapes.iter().map(|(rows, columns, kind)| rows * columns * TENSOR_TYPES[*kind].block).sum();
        prop_assert_eq!(elements, expected);
        prop_assert_eq!(card("x", &[header]).tensors, shapes.len());
    }

    #[test]
    fn cut_and_changed_headers_are_survived(cut in 0.0..1.0_f64, at in 0.0..1.0_f64, byte in any::<u8>()) {
        let mut bytes = tiny().bytes();
        let place = |share: f64, bytes: &[u8]| (share * bytes.len() as f64) as usize;
        let end = place(cut, &bytes);
        let is_cut = matches!(read("cut.gguf", &bytes[..end]), Err(GgufError::Cut { .. }));
        prop_assert!(is_cut);
        let at = place(at, &bytes);
        bytes[at] = byte;
        if let Ok(header) = read("changed.gguf", bytes.as_slice()) {
            let _ = card("changed", &[header]);
        }
    }
}
