//! Where one rank's compute ends and a collective begins: the place to measure and to pace.

/// What was computed since the last collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SegmentKind {
    /// Norm, q/k/v, rotation, cache write and attention; in `fast` also the output projection. The first
    /// one of a stage includes the embedding, every other the residual sum of the layer before.
    Attention,
    /// Rows of the output projection; only in `invariant`.
    OutputRows,
    /// Residual sum, norm, gate, up and activation; in `fast` also the down projection.
    Mlp,
    /// Rows of the down projection; only in `invariant`.
    DownRows,
    /// What follows the last collective of a stage: the residual sum, and on the last stage the final norm
    /// and the LM head.
    StageEnd,
}

/// One compute segment of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Segment {
    /// The layer, numbered in the whole model; of the last one for [`SegmentKind::StageEnd`].
    pub layer: u32,
    /// Which part of it.
    pub kind: SegmentKind,
}

/// Told when compute segments begin and end. The device is idle at both instants.
pub trait SegmentMeter {
    /// A segment starts now: at the start of a step and after every collective.
    fn begin(&mut self);

    /// A segment has ended, and its collective or the end of the step follows when this returns.
    fn end(&mut self, segment: Segment);
}

/// Measures nothing and costs nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoMeter;

impl SegmentMeter for NoMeter {
    fn begin(&mut self) {}
    fn end(&mut self, _: Segment) {}
}
