//! The contract between an operation and the device: one shader launch as plain data.
//!
//! Operations produce `Kernel`s without a device at hand (so every variant can be validated by naga
//! in a test); the executor turns them into pipelines and bind groups once, at compile time.

use std::borrow::Cow;

/// What one storage binding of a [`Kernel`] refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bind {
    /// The `i`-th input of the operation.
    In(usize),
    /// The `i`-th output of the operation.
    Out(usize),
    /// The `i`-th scratch buffer that the operation asked for.
    Scratch(usize),
}

/// One dispatch: WGSL text, constants, what is bound where, and how many workgroups.
///
/// Convention: everything is in `@group(0)`; `@binding(i)` is the storage buffer `bindings[i]`, and the
/// uniform block, when `params` is not empty, is `@binding(bindings.len())`.
///
/// A shader must prove its own indices in range and write workgroup memory before it reads it: unless
/// checks are asked for, natively nothing clamps an index or clears that memory.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Name shown by the profiler, e.g. `layer_norm` or `matmul_reg8x8`.
    pub label: Cow<'static, str>,
    /// WGSL source.
    pub source: Cow<'static, str>,
    /// Entry point.
    pub entry: &'static str,
    /// Pipeline-overridable constants (`override NAME: u32;`).
    pub constants: Vec<(&'static str, f64)>,
    /// Storage buffers in binding order.
    pub bindings: Vec<Bind>,
    /// Bytes of the uniform block in WGSL layout (made by `encase`), empty for none.
    pub params: Vec<u8>,
    /// Workgroups in x, y, z; each at most 65,535.
    pub groups: [u32; 3],
}

/// Splits `n` workgroups over x and y so that neither exceeds WebGPU's 65,535.
///
/// The shader recovers the linear index as `wid.x + wid.y * num_workgroups.x` and must check it
/// against its own bound, as `x * y >= n`.
pub fn fold_groups(n: u64) -> [u32; 3] {
    const MAX: u64 = 65_535;
    if n <= MAX {
        [n.max(1) as u32, 1, 1]
    } else {
        let y = n.div_ceil(MAX);
        [n.div_ceil(y) as u32, y as u32, 1]
    }
}
