//! Slices against the `safetensors` crate, and files made to harm.

use std::path::Path;

use infercluster_spec::IndexRange;
use safetensors::SafeTensors;
use tempfile::TempDir;

use super::{Checkpoint, CheckpointError};
use crate::backend::MatrixShape;

fn folder(file: &[u8]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    folder
}

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend((0..data).map(|byte| byte as u8));
    file
}

fn tensor(name: &str, dtype: &str, shape: &str, start: usize, end: usize) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{start},{end}]}}"#)
}

fn range(start: u32, end: u32) -> IndexRange {
    IndexRange::new(start, end).unwrap()
}

const SHAPE: MatrixShape = MatrixShape { rows: 3, columns: 4 };

#[test]
fn slices_are_the_rows_and_columns_asked_for() {
    let entries = [tensor("w", "BF16", "3,4", 4, 28), tensor("b", "F32", "1", 0, 4)].join(",");
    let header = format!(r#"{{"__metadata__":{{"format":"pt"}},{entries}}}"#);
    let bytes = file(&header, 28);
    let folder = folder(&bytes);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let whole = SafeTensors::deserialize(&bytes).unwrap();
    let whole = whole.tensor("w").unwrap().data().to_vec();
    // Element (row, column) is two bytes at 8 row + 2 column.
    let rows = checkpoint.slice_rows("w", SHAPE, range(1, 3)).unwrap();
    assert_eq!(rows.bytes[..], whole[8..24]);
    let columns = checkpoint.slice_columns("w", SHAPE, range(1, 3)).unwrap();
    let by_hand = [&whole[2..6], &whole[10..14], &whole[18..22]].concat();
    assert_eq!(columns.bytes[..], by_hand);
    assert_eq!((columns.shape.rows, columns.shape.columns), (3, 2));
    let all = checkpoint.slice_columns("w", SHAPE, range(0, 4)).unwrap();
    assert_eq!(all.bytes[..], whole);
    assert!(
        checkpoint
            .slice_columns("w", SHAPE, range(2, 2))
            .unwrap()
            .bytes
            .is_empty()
    );
    assert_eq!(
        checkpoint.slice_vector("b", 1, range(0, 1)).unwrap().bytes[..],
        [0, 1, 2, 3]
    );
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["b", "w"]);
}

#[test]
fn hostile_files_are_one_clear_error() {
    let braced = |entries: &[String]| format!("{{{}}}", entries.join(","));
    let header = |entries: &[String], data| file(&braced(entries), data);
    let huge = |length: u64| {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{}");
        bytes
    };
    let overflow = "4294967296,4294967296,16";
    let pair = |start| {
        [
            tensor("a", "F32", "2", 0, 8),
            tensor("b", "F32", "2", start, start + 8),
        ]
    };
    let cases: [(Vec<u8>, &str); 14] = [
        (vec![1, 2, 3], "takes 8 bytes, but the file has 3"),
        (huge(1 << 60), "above the limit"),
        (huge(u64::MAX), "above the limit"),
        (huge(50), "takes 58 bytes, but the file has 10"),
        (file("{", 0), "EOF while parsing"),
        (file("[]", 0), "invalid type"),
        (
            file(r#"{"a":{"dtype":"F33","shape":[],"data_offsets":[0,0]}}"#, 0),
            "unknown variant",
        ),
        (
            file(r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, 4),
            "invalid value",
        ),
        (
            header(&[tensor("a", "F32", overflow, 0, 8)], 8),
            "tensor a: shape [4294967296, 4294967296, 16]",
        ),
        (
            header(&[tensor("a", "F32", "3", 0, 8)], 8),
            "tensor a: shape [3] of F32 takes 12 bytes",
        ),
        (
            header(&[tensor("a", "F32", "2", 8, 0)], 8),
            "but its range is 8..0",
        ),
        (
            header(&[tensor("a", "F32", "4", 0, 16)], 8),
            "tensor a ends at byte 16",
        ),
        (header(&pair(4), 12), "tensor b starts at byte 4"),
        (header(&pair(12), 20), "tensor b starts at byte 12"),
    ];
    for (bytes, expected) in cases {
        let folder = folder(&bytes);
        let found = Checkpoint::open(folder.path()).unwrap_err().to_string();
        assert!(
            found.contains(expected) && found.contains("model.safetensors"),
            "{found}"
        );
    }
    let folder = folder(&header(&pair(8), 20));
    let found = Checkpoint::open(folder.path()).unwrap_err();
    assert!(
        matches!(found, CheckpointError::TrailingData { unused: 4, .. }),
        "{found}"
    );
}

#[test]
fn every_truncation_of_a_good_file_is_an_error() {
    let good = file(&format!("{{{}}}", tensor("a", "F32", "2", 0, 8)), 8);
    for length in 0..good.len() {
        let folder = folder(&good[..length]);
        assert!(Checkpoint::open(folder.path()).is_err(), "{length}");
    }
    let folder = folder(&good);
    assert!(Checkpoint::open(folder.path()).is_ok());
}

#[test]
fn tensors_that_do_not_fit_the_model_are_named() {
    let entries = [
        tensor("w", "BF16", "3,4", 0, 24),
        tensor("i", "I64", "3,4", 24, 120),
    ]
    .join(",");
    let folder = folder(&file(&format!("{{{entries}}}"), 120));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let other = MatrixShape { rows: 4, columns: 3 };
    let cases = [
        (
            checkpoint.slice_rows("v", SHAPE, range(0, 1)),
            "there is no tensor v",
        ),
        (
            checkpoint.slice_rows("w", other, range(0, 1)),
            "tensor w has shape [3, 4]",
        ),
        (
            checkpoint.slice_vector("w", 12, range(0, 1)),
            "tensor w has shape [3, 4]",
        ),
        (
            checkpoint.slice_rows("w", SHAPE, range(2, 4)),
            "tensor w has 3 rows, 2..4",
        ),
        (
            checkpoint.slice_columns("w", SHAPE, range(0, 5)),
            "tensor w has 4 columns, 0..5",
        ),
        (
            checkpoint.slice_rows("i", SHAPE, range(0, 1)),
            "tensor i is stored as I64",
        ),
    ];
    for (found, expected) in cases {
        let found = found.unwrap_err().to_string();
        assert!(found.contains(expected), "{found}");
    }
}

fn indexed(map: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write(
        "one.safetensors",
        &file(&format!("{{{}}}", tensor("a", "F32", "1", 0, 4)), 4),
    );
    write(
        "two.safetensors",
        &file(&format!("{{{}}}", tensor("w", "F32", "3,4", 0, 48)), 48),
    );
    write(
        "model.safetensors.index.json",
        format!(r#"{{"weight_map":{map}}}"#).as_bytes(),
    );
    folder
}

#[test]
fn an_index_ties_files_together() {
    let folder = indexed(r#"{"a":"one.safetensors","w":"two.safetensors"}"#);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(
        checkpoint.slice_vector("a", 1, range(0, 1)).unwrap().bytes.len(),
        4
    );
    assert_eq!(
        checkpoint.slice_rows("w", SHAPE, range(2, 3)).unwrap().bytes[..],
        (32..48).collect::<Vec<u8>>()
    );
}

#[test]
fn an_index_stays_in_its_folder() {
    let cases = [
        (r#"{"a":"../one.safetensors"}"#, "is not a plain file name"),
        (r#"{"a":"/etc/passwd"}"#, "is not a plain file name"),
        (r#"{"a":".."}"#, "is not a plain file name"),
        (r#"{"a":""}"#, "is not a plain file name"),
        (r#"{"a":"./one.safetensors"}"#, "is not a plain file name"),
        (r#"{"w":"one.safetensors"}"#, "tensor w is not in"),
        (r#"{"a":"three.safetensors"}"#, "three.safetensors"),
        (r#"["a"]"#, "invalid type"),
    ];
    for (map, expected) in cases {
        let folder = indexed(map);
        let found = Checkpoint::open(folder.path()).unwrap_err().to_string();
        assert!(found.contains(expected), "{found}");
    }
}

#[test]
fn an_empty_folder_says_what_was_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    let found = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(found.contains("neither model.safetensors nor"), "{found}");
    assert!(Checkpoint::open(Path::new("/does/not/exist")).is_err());
}
