//! The table of families: data in `catalogue/families.toml`, read once.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::toml_file;

/// One family as the table describes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Row {
    pub(super) model_type: String,
    pub(super) architectures: Vec<String>,
    /// Absent: the layers are not described, parameters cannot be counted.
    pub(super) count: Option<Counted>,
    /// The family of the language model inside a wrapper.
    pub(super) text: Option<String>,
    #[serde(default)]
    pub(super) norm: Norm,
    #[serde(default = "two")]
    pub(super) norms: u32,
    #[serde(default)]
    pub(super) mlp: MlpForm,
    pub(super) qk_norm: Option<HeadNorm>,
    /// The key that switches `qk_norm` on; always on where there is none.
    pub(super) qk_norm_key: Option<String>,
    #[serde(default)]
    pub(super) bias: Vec<Biased>,
    #[serde(default)]
    pub(super) bias_keys: BTreeMap<String, Vec<Biased>>,
    pub(super) positions: Option<Positions>,
    #[serde(default)]
    pub(super) position_offset: u32,
    /// A norm after the embedding.
    #[serde(default)]
    pub(super) embedding_norm: bool,
    #[serde(default)]
    pub(super) router_bias: bool,
    #[serde(default)]
    pub(super) expert_bias: bool,
    /// One number a query head that the softmax adds.
    #[serde(default)]
    pub(super) sinks: bool,
    /// The shared expert has a gate of one column.
    #[serde(default)]
    pub(super) shared_gate: bool,
    /// `"ffn"`: one shared expert as wide as the routed ones, without a key that says so.
    pub(super) shared: Option<SharedExpert>,
    /// Key of the width of layers without experts, where it is not the usual one.
    pub(super) dense_ffn: Option<String>,
    /// The query projection holds a gate of the same width.
    #[serde(default)]
    pub(super) attention_gate: bool,
    pub(super) mixer: Option<MixerForm>,
    /// The mixer norms its step widths and states.
    #[serde(default)]
    pub(super) mixer_norms: bool,
    pub(super) attention: Option<NoAttention>,
    #[serde(default)]
    pub(super) unless: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) defaults: BTreeMap<String, Assumed>,
}

fn two() -> u32 {
    2
}

/// A value that a configuration class assumes.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged)]
pub(super) enum Assumed {
    Flag(bool),
    Count(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Counted {
    Decoder,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Norm {
    #[default]
    Rms,
    Layer,
    LayerWithoutBias,
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum MlpForm {
    #[default]
    Gated,
    Plain,
    HalfGated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum HeadNorm {
    Head,
    Model,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Biased {
    Q,
    K,
    V,
    O,
    Mlp,
    Head,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Positions {
    Learned,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum SharedExpert {
    Ffn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum MixerForm {
    Mamba1,
    Mamba2,
    GatedDelta,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum NoAttention {
    None,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileForm {
    family: Vec<Row>,
}

static ROWS: LazyLock<Vec<Row>> = LazyLock::new(|| {
    let file: FileForm = toml_file::read("families.toml", include_str!("../../../catalogue/families.toml"))
        .unwrap_or_else(|error| panic!("built-in table of families: {error}"));
    file.family
});

/// Every row, in the order of the file.
pub(super) fn rows() -> &'static [Row] {
    &ROWS
}

/// The row of a model type; where a file gives none, that of an architecture.
pub(super) fn find(model_type: Option<&str>, architecture: Option<&str>) -> Option<&'static Row> {
    let by_type = model_type.and_then(|name| rows().iter().find(|row| row.model_type == name));
    by_type.or_else(|| {
        let name = architecture?;
        rows()
            .iter()
            .find(|row| row.architectures.iter().any(|known| known == name))
    })
}
