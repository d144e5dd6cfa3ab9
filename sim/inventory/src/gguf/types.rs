//! Types of tensors: how many numbers a block holds, and how many bytes it takes.

/// One type of stored numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorType {
    /// Its number in files.
    pub id: u32,
    /// Its name, as the tools print it.
    pub name: &'static str,
    /// Numbers of one block.
    pub block: u64,
    /// Bytes of one block.
    pub bytes: u64,
}

const fn row(id: u32, name: &'static str, block: u64, bytes: u64) -> TensorType {
    TensorType {
        id,
        name,
        block,
        bytes,
    }
}

/// Types of the public definition; retired numbers are listed where files with them exist.
pub const TENSOR_TYPES: [TensorType; 37] = [
    row(0, "F32", 1, 4),
    row(1, "F16", 1, 2),
    row(2, "Q4_0", 32, 18),
    row(3, "Q4_1", 32, 20),
    row(6, "Q5_0", 32, 22),
    row(7, "Q5_1", 32, 24),
    row(8, "Q8_0", 32, 34),
    row(9, "Q8_1", 32, 36),
    row(10, "Q2_K", 256, 84),
    row(11, "Q3_K", 256, 110),
    row(12, "Q4_K", 256, 144),
    row(13, "Q5_K", 256, 176),
    row(14, "Q6_K", 256, 210),
    row(15, "Q8_K", 256, 292),
    row(16, "IQ2_XXS", 256, 66),
    row(17, "IQ2_XS", 256, 74),
    row(18, "IQ3_XXS", 256, 98),
    row(19, "IQ1_S", 256, 50),
    row(20, "IQ4_NL", 32, 18),
    row(21, "IQ3_S", 256, 110),
    row(22, "IQ2_S", 256, 82),
    row(23, "IQ4_XS", 256, 136),
    row(24, "I8", 1, 1),
    row(25, "I16", 1, 2),
    row(26, "I32", 1, 4),
    row(27, "I64", 1, 8),
    row(28, "F64", 1, 8),
    row(29, "IQ1_M", 256, 56),
    row(30, "BF16", 1, 2),
    row(31, "Q4_0_4_4", 32, 18),
    row(32, "Q4_0_4_8", 32, 18),
    row(33, "Q4_0_8_8", 32, 18),
    row(34, "TQ1_0", 256, 54),
    row(35, "TQ2_0", 256, 66),
    row(36, "IQ4_NL_4_4", 32, 18),
    row(39, "MXFP4", 32, 17),
    row(40, "NVFP4", 64, 36),
];

/// The type with that number.
pub fn tensor_type(id: u32) -> Option<&'static TensorType> {
    TENSOR_TYPES.iter().find(|known| known.id == id)
}

/// What `general.file_type` says, as the tools print it.
pub(super) fn file_type(id: u64) -> Option<&'static str> {
    Some(match id {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        19 => "IQ2_XXS",
        20 => "IQ2_XS",
        21 => "Q2_K_S",
        22 => "IQ3_XS",
        23 => "IQ3_XXS",
        24 => "IQ1_S",
        25 => "IQ4_NL",
        26 => "IQ3_S",
        27 => "IQ3_M",
        28 => "IQ2_S",
        29 => "IQ2_M",
        30 => "IQ4_XS",
        31 => "IQ1_M",
        32 => "BF16",
        36 => "TQ1_0",
        37 => "TQ2_0",
        38 => "MXFP4",
        _ => return None,
    })
}
