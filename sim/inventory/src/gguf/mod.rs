//! Headers of GGUF files: metadata and the table of tensors, never the tensors themselves.
//!
//! Every count, length and offset of the file is checked before it is used; memory grows with what is really
//! there. Long lists of metadata (a vocabulary, its merges) are counted and skipped.

mod card;
mod error;
mod source;
mod types;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

pub use card::{GgufCard, card, load_card};
pub use error::GgufError;
use source::Source;
pub use types::{TENSOR_TYPES, TensorType, tensor_type};

/// Most tensors of one file; the largest published models have some thousands.
const TENSORS_LIMIT: u64 = 1 << 17;
/// Most entries of the metadata.
const ENTRIES_LIMIT: u64 = 1 << 16;
/// Longest name of a key or a tensor.
const NAME_LIMIT: u64 = 4096;
/// Most numbers of a list that is kept: one a layer.
const LIST_KEPT: u64 = 1 << 12;
/// Most sides of a tensor.
const SIDES_LIMIT: u32 = 4;
/// Lists within lists.
const DEPTH_LIMIT: u32 = 4;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// A whole number of at least zero.
    Count(u64),
    /// A negative number.
    Negative(i64),
    /// A number with a fraction.
    Number(f64),
    /// True or false.
    Flag(bool),
    /// A text.
    Text(String),
    /// A short list of whole numbers.
    Counts(Vec<u64>),
    /// A list whose entries were skipped, or a text that was.
    Skipped {
        /// How many entries or bytes it has.
        entries: u64,
    },
}

/// One tensor of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// Its sides, the fastest first.
    pub shape: Vec<u64>,
    /// The number of its type.
    pub type_id: u32,
    /// Where its data starts, from the start of the data.
    pub offset: u64,
    /// Numbers that it holds.
    pub elements: u64,
    /// Bytes that it takes; `None` for a type that is not known here.
    pub bytes: Option<u64>,
}

/// A header.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufHeader {
    /// Version of the format.
    pub version: u32,
    /// The metadata.
    pub metadata: BTreeMap<String, GgufValue>,
    /// The tensors, in the order of the file.
    pub tensors: Vec<GgufTensor>,
    /// Where the data starts.
    pub data_start: u64,
}

impl GgufHeader {
    /// A whole number of the metadata.
    pub fn count(&self, key: &str) -> Option<u64> {
        match self.metadata.get(key) {
            Some(GgufValue::Count(count)) => Some(*count),
            _ => None,
        }
    }

    /// A text of the metadata.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.metadata.get(key) {
            Some(GgufValue::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// How many files the model is cut into.
    pub fn parts(&self) -> u64 {
        self.count("split.count").unwrap_or(1).max(1)
    }

    /// Where the data of the last tensor ends, from the start of the file.
    pub fn data_end(&self) -> u64 {
        let ends = self.tensors.iter().map(|tensor| {
            let bytes = tensor.bytes.unwrap_or(0);
            tensor
                .offset
                .saturating_add(bytes)
                .saturating_add(self.data_start)
        });
        ends.max().unwrap_or(self.data_start)
    }
}

/// Reads the header of the file at `path`.
pub fn load(path: &Path) -> Result<GgufHeader, GgufError> {
    let file = path.display().to_string();
    match File::open(path) {
        Ok(handle) => read(&file, BufReader::new(handle)),
        Err(source) => Err(GgufError::Io { file, source }),
    }
}

/// Reads a header; `file` is only the name that errors carry.
pub fn read(file: &str, source: impl Read) -> Result<GgufHeader, GgufError> {
    let mut source = Source::new(file, source);
    let magic: [u8; 4] = source.array("the first bytes")?;
    if &magic != b"GGUF" {
        return Err(GgufError::Magic {
            file: file.to_owned(),
            found: format!("\"{}\"", magic.escape_ascii()),
        });
    }
    let version = source.u32("the version")?;
    if !(1..=3).contains(&version) {
        return Err(GgufError::Version {
            file: file.to_owned(),
            found: version,
        });
    }
    source.short_lengths = version == 1;
    let tensors = source.length("the number of tensors")?;
    if tensors > TENSORS_LIMIT {
        return Err(source.too_many("the number of tensors", tensors, TENSORS_LIMIT));
    }
    let entries = source.length("the number of metadata entries")?;
    if entries > ENTRIES_LIMIT {
        return Err(source.too_many("the number of metadata entries", entries, ENTRIES_LIMIT));
    }
    let metadata = metadata(&mut source, entries)?;
    let mut table = Vec::new();
    for _ in 0..tensors {
        table.push(tensor(&mut source)?);
    }
    let alignment = alignment(&source, &metadata)?;
    check_data(file, &table, alignment)?;
    Ok(GgufHeader {
        version,
        data_start: source.at().next_multiple_of(alignment),
        metadata,
        tensors: table,
    })
}

fn metadata<R: Read>(source: &mut Source<R>, entries: u64) -> Result<BTreeMap<String, GgufValue>, GgufError> {
    let mut metadata = BTreeMap::new();
    for _ in 0..entries {
        let key = source.text("a metadata key", NAME_LIMIT)?;
        let type_id = source.u32(&format!("the type of `{key}`"))?;
        let value = value(source, &key, type_id)?;
        if metadata.contains_key(&key) {
            return Err(source.bad(
                "a metadata key",
                format!("`{key}` for the second time"),
                "named once",
            ));
        }
        metadata.insert(key, value);
    }
    Ok(metadata)
}

/// Types of metadata values, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueType {
    Unsigned(u32),
    Signed(u32),
    Float(u32),
    Flag,
    Text,
    List,
}

impl ValueType {
    fn of<R: Read>(source: &Source<R>, key: &str, id: u32) -> Result<Self, GgufError> {
        Ok(match id {
            0 => Self::Unsigned(1),
            1 => Self::Signed(1),
            2 => Self::Unsigned(2),
            3 => Self::Signed(2),
            4 => Self::Unsigned(4),
            5 => Self::Signed(4),
            6 => Self::Float(4),
            7 => Self::Flag,
            8 => Self::Text,
            9 => Self::List,
            10 => Self::Unsigned(8),
            11 => Self::Signed(8),
            12 => Self::Float(8),
            _ => return Err(source.bad(&format!("the type of `{key}`"), id, "a number from 0 to 12")),
        })
    }

    /// Bytes of a value of fixed size.
    fn bytes(self) -> Option<u32> {
        match self {
            Self::Unsigned(bytes) | Self::Signed(bytes) | Self::Float(bytes) => Some(bytes),
            Self::Flag => Some(1),
            Self::Text | Self::List => None,
        }
    }
}

fn value<R: Read>(source: &mut Source<R>, key: &str, type_id: u32) -> Result<GgufValue, GgufError> {
    match ValueType::of(source, key, type_id)? {
        ValueType::Text => Ok(match source.value_text(key)? {
            Some(text) => GgufValue::Text(text),
            None => GgufValue::Skipped { entries: 1 },
        }),
        ValueType::List => list(source, key, 1),
        fixed => scalar(source, key, fixed),
    }
}

fn scalar<R: Read>(source: &mut Source<R>, key: &str, kind: ValueType) -> Result<GgufValue, GgufError> {
    let raw = match kind.bytes() {
        Some(1) => u64::from(u8::from_le_bytes(source.array(key)?)),
        Some(2) => u64::from(u16::from_le_bytes(source.array(key)?)),
        Some(4) => u64::from(source.u32(key)?),
        _ => source.u64(key)?,
    };
    let signed = |bytes: u32| {
        let unused = 64 - 8 * bytes;
        ((raw << unused) as i64) >> unused
    };
    Ok(match kind {
        ValueType::Signed(bytes) => match signed(bytes) {
            count @ 0.. => GgufValue::Count(count as u64),
            negative => GgufValue::Negative(negative),
        },
        ValueType::Float(4) => GgufValue::Number(f64::from(f32::from_bits(raw as u32))),
        ValueType::Float(_) => GgufValue::Number(f64::from_bits(raw)),
        ValueType::Flag => GgufValue::Flag(raw != 0),
        _ => GgufValue::Count(raw),
    })
}

fn list<R: Read>(source: &mut Source<R>, key: &str, depth: u32) -> Result<GgufValue, GgufError> {
    let type_id = source.u32(&format!("the type of the entries of `{key}`"))?;
    let kind = ValueType::of(source, key, type_id)?;
    let entries = source.length(&format!("the number of entries of `{key}`"))?;
    match kind {
        ValueType::Text => {
            // Every text takes bytes of the file, so the end of the file ends a number that lies.
            for _ in 0..entries {
                let length = source.length(&format!("an entry of `{key}`"))?;
                source.skip(length, &format!("an entry of `{key}`"))?;
            }
        }
        ValueType::List if depth >= DEPTH_LIMIT => {
            return Err(source.bad(&format!("`{key}`"), "nested too deeply", "a list of plain values"));
        }
        ValueType::List => {
            for _ in 0..entries {
                list(source, key, depth + 1)?;
            }
        }
        ValueType::Unsigned(_) | ValueType::Signed(_) if entries <= LIST_KEPT && depth == 1 => {
            return counts(source, key, kind, entries);
        }
        fixed => {
            let bytes = u64::from(fixed.bytes().expect("texts and lists were handled above"));
            source.skip(entries.saturating_mul(bytes), &format!("the entries of `{key}`"))?;
        }
    }
    Ok(GgufValue::Skipped { entries })
}

fn counts<R: Read>(
    source: &mut Source<R>,
    key: &str,
    kind: ValueType,
    entries: u64,
) -> Result<GgufValue, GgufError> {
    let mut counts = Vec::new();
    let mut whole = true;
    for _ in 0..entries {
        match scalar(source, key, kind)? {
            GgufValue::Count(count) => counts.push(count),
            _ => whole = false,
        }
    }
    Ok(if whole {
        GgufValue::Counts(counts)
    } else {
        GgufValue::Skipped { entries }
    })
}

fn tensor<R: Read>(source: &mut Source<R>) -> Result<GgufTensor, GgufError> {
    let name = source.text("the name of a tensor", NAME_LIMIT)?;
    let wrong = |source: &Source<R>, what: String| GgufError::Tensor {
        file: source.file().to_owned(),
        tensor: name.clone(),
        what,
    };
    let sides = source.u32("the number of sides of a tensor")?;
    if sides > SIDES_LIMIT {
        return Err(wrong(
            source,
            format!("it has {sides} sides, at most {SIDES_LIMIT} are accepted"),
        ));
    }
    let mut shape = Vec::new();
    for _ in 0..sides {
        shape.push(source.length("a side of a tensor")?);
    }
    let type_id = source.u32("the type of a tensor")?;
    let offset = source.u64("the offset of a tensor")?;
    let elements = shape
        .iter()
        .try_fold(1_u64, |so_far, side| so_far.checked_mul(*side));
    let Some(elements) = elements.filter(|elements| *elements <= crate::config::PARAMS_LIMIT) else {
        return Err(wrong(
            source,
            format!("its sides {shape:?} multiply to more numbers than any model has"),
        ));
    };
    let bytes = match tensor_type(type_id) {
        None => None,
        Some(known) => {
            let row = shape.first().copied().unwrap_or(1);
            if !row.is_multiple_of(known.block) {
                let what = format!(
                    "rows of {row} numbers are no multiple of {} blocks of {}",
                    known.name, known.block
                );
                return Err(wrong(source, what));
            }
            Some(elements / known.block * known.bytes)
        }
    };
    Ok(GgufTensor {
        name,
        shape,
        type_id,
        offset,
        elements,
        bytes,
    })
}

fn alignment<R>(source: &Source<R>, metadata: &BTreeMap<String, GgufValue>) -> Result<u64, GgufError>
where
    R: Read,
{
    const KEY: &str = "general.alignment";
    match metadata.get(KEY) {
        None => Ok(32),
        Some(GgufValue::Count(found)) if found.is_power_of_two() && *found <= 1 << 20 => Ok(*found),
        Some(other) => Err(source.bad(
            &format!("`{KEY}`"),
            format!("{other:?}"),
            "a power of two up to 1048576",
        )),
    }
}

/// Tensors have names of their own, start aligned, and share no byte.
fn check_data(file: &str, tensors: &[GgufTensor], alignment: u64) -> Result<(), GgufError> {
    let wrong = |tensor: &GgufTensor, what: String| GgufError::Tensor {
        file: file.to_owned(),
        tensor: tensor.name.clone(),
        what,
    };
    let mut names: Vec<&GgufTensor> = tensors.iter().collect();
    names.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = names.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(wrong(pair[0], "it is described twice".to_owned()));
    }
    let mut order: Vec<&GgufTensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
    let mut end = 0;
    for tensor in order {
        let Some(next) = tensor.offset.checked_add(tensor.bytes.unwrap_or(0)) else {
            return Err(wrong(
                tensor,
                format!("offset {} is past the end of any file", tensor.offset),
            ));
        };
        if !tensor.offset.is_multiple_of(alignment) {
            let what = format!(
                "offset {} is no multiple of the alignment {alignment}",
                tensor.offset
            );
            return Err(wrong(tensor, what));
        }
        if tensor.offset < end {
            let what = format!(
                "offset {} lies inside the tensor before it, which ends at {end}",
                tensor.offset
            );
            return Err(wrong(tensor, what));
        }
        end = next;
    }
    Ok(())
}

/// The files of a model that is cut into several, by the names that the tools give them; `None` where `path`
/// is not named so.
pub fn part_paths(path: &Path, parts: u64) -> Option<Vec<PathBuf>> {
    const PARTS_LIMIT: u64 = 10_000;
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(".gguf")?;
    let (start, total) = stem.rsplit_once("-of-")?;
    let (prefix, number) = start.rsplit_once('-')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_named_so = is_number(total) && is_number(number) && total.parse() == Ok(parts);
    let width = number.len();
    (is_named_so && parts <= PARTS_LIMIT).then(|| {
        (1..=parts)
            .map(|part| path.with_file_name(format!("{prefix}-{part:0width$}-of-{total}.gguf")))
            .collect()
    })
}
