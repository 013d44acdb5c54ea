//! What the operations that only move elements share: parameter blocks, vec4 templates, parallel copies.

use super::Real;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::par::*;

/// A uniform block of words (which WGSL lays out one after the other).
pub(crate) fn words(w: &[u32]) -> Vec<u8> {
    bytemuck::cast_slice(w).to_vec()
}

/// `source` with `{{T}}` replaced by `vec4<f32>` (4 elements) or `f32` (1 element).
pub(crate) fn typed(source: &str, unit: usize) -> String {
    source.replace("{{T}}", if unit == 4 { "vec4<f32>" } else { "f32" })
}

/// 4 when every size is a multiple of 4, else 1: how many elements one shader access moves.
pub(crate) fn unit(sizes: &[usize]) -> usize {
    if sizes.iter().all(|s| s.is_multiple_of(4)) { 4 } else { 1 }
}

/// Copies a long slice on all threads.
pub(crate) fn par_copy<T: Real>(to: &mut [T], from: &[T]) {
    const CHUNK: usize = 1 << 15;
    assert_eq!(to.len(), from.len());
    to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(t, f)| t.copy_from_slice(f));
}

/// The launch of `reduce.wgsl` that sums `[n, inner]` over `n` in runs of `per` → `[⌈n/per⌉, inner]`.
pub(crate) fn sum_kernel(
    label: &'static str,
    from: Bind,
    to: Bind,
    n: usize,
    inner: usize,
    per: usize,
) -> Kernel {
    let runs = n.div_ceil(per);
    Kernel {
        label: label.into(),
        source: include_str!("../../shaders/reduce.wgsl").into(),
        entry: "main",
        constants: vec![],
        bindings: vec![from, to],
        params: words(&[n, inner, runs, per, runs * inner].map(|v| v as u32)),
        groups: fold_groups((runs * inner).div_ceil(64) as u64),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::gpu::reflect::{check_default_limits, reflect};
    use crate::graph::Shape;
    use crate::ops::{GpuCaps, GpuLaunch, GpuRequest, MatmulChoice, Op, matmul_wgsl};

    #[derive(Debug)]
    struct NoChoice;
    impl MatmulChoice for NoChoice {
        fn choose(&self, _: &matmul_wgsl::MatmulSpec) -> matmul_wgsl::Variant {
            unreachable!("no products here")
        }
    }

    /// The launches of `op`, each parsed, validated and within the default limits.
    pub(crate) fn validated(op: &dyn Op, inputs: &[&[usize]]) -> GpuLaunch {
        let inputs: Vec<Shape> = inputs.iter().map(|d| Shape::new(d)).collect();
        let outputs = op.outputs(&inputs);
        let caps = GpuCaps { is_cpu: true, matmul: std::sync::Arc::new(NoChoice) };
        let launch = op.gpu(&GpuRequest { inputs: &inputs, outputs: &outputs, in_place: None, caps: &caps });
        for k in &launch.kernels {
            let r = reflect(k).unwrap_or_else(|e| panic!("{}: {e}\n{}", k.label, k.source));
            check_default_limits(&k.label, &r).unwrap();
        }
        launch
    }
}
