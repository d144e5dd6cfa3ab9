//! The device interface: about a dozen operators on opaque buffers.

/// A device that can run Llama-like layers.
pub trait Backend: Send + 'static {
    /// Memory of the device, in f32 elements.
    type Buffer: Send;
}

/// The CPU, profile `cpu-f32/1`.
#[derive(Debug, Clone, Copy)]
pub struct Cpu;

impl Backend for Cpu {
    type Buffer = Vec<f32>;
}
