//! One file per operation: contract, shape rule, cost, vjp, CPU implementation, shader launch.
//!
//! Adding an operation touches one `.rs` here and one `.wgsl` in `shaders/`, and no match statement
//! elsewhere: everything that the graph, the passes and the executors need is behind [`Op`].

pub mod access;
pub mod accumulate;
pub mod attention;
pub mod cast;
pub mod concat;
pub mod conv2d;
pub mod copy;
pub mod cpu;
pub mod dropout;
pub mod embedding;
pub mod embedding_grad;
pub mod expr;
pub mod fm;
pub mod guard;
pub mod host;
pub mod layer_norm;
pub mod map;
pub mod matmul;
pub mod matmul_tune;
pub mod matmul_wgsl;
pub mod mhc_project;
pub mod norm_params;
pub mod optim;
pub mod optim_rows;
pub mod pairwise;
pub mod permute;
pub mod real;
pub mod reduce;
pub mod rms_norm;
pub mod round;
pub mod row;
pub mod row_l2;
pub mod sinkhorn;
pub mod sinkhorn_cpu;
pub mod slice;
pub mod softmax;
pub mod sparse_index;
pub mod stream_aggregate;
pub mod stream_merge;
pub mod streams;
pub mod sum_squares;
pub mod tile;

use crate::gpu::kernel::Kernel;
use crate::graph::{DType, Form, Graph, Shape, Tensor, ValueType};
use std::any::Any;
use std::fmt::Debug;

pub use cpu::Cpu;
pub use real::Real;

/// What an operation costs: an estimate for reports and schedules, not a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations (a multiply-add is two; an exp counts as one).
    pub flops: f64,
    /// Bytes read from memory.
    pub read: f64,
    /// Bytes written to memory.
    pub written: f64,
}

/// What autodiff hands to an operation's [`Op::vjp`].
pub struct Vjp<'a> {
    /// The operation's inputs.
    pub inputs: &'a [Tensor],
    /// Its outputs.
    pub outputs: &'a [Tensor],
    /// Gradient of the loss with respect to each output; `None` where an output is not used.
    pub grads: &'a [Option<Tensor>],
    /// Which inputs' gradients are wanted.
    pub wanted: &'a [bool],
}

/// The device, as far as a shader launch needs to know it.
#[derive(Clone, Debug)]
pub struct GpuCaps {
    /// A software driver (lavapipe, SwiftShader): row-per-invocation and register tiles are fast.
    pub is_cpu: bool,
    /// How the variants of the matrix product are chosen.
    pub matmul: std::sync::Arc<dyn MatmulChoice>,
}

/// Chooses the variant of a matrix product; the default is by device type, the tuner measures.
pub trait MatmulChoice: Debug + Send + Sync {
    /// The variant for this product.
    fn choose(&self, spec: &matmul_wgsl::MatmulSpec) -> matmul_wgsl::Variant;
}

/// What [`Op::gpu`] is asked for.
pub struct GpuRequest<'a> {
    /// Input shapes.
    pub inputs: &'a [Shape],
    /// Output shapes.
    pub outputs: &'a [Shape],
    /// `Some((i, o))`: output `o` is stored in the buffer of input `i`, which must not be bound again.
    pub in_place: Option<(usize, usize)>,
    /// The device.
    pub caps: &'a GpuCaps,
}

/// The launches of one operation on the device, and the scratch buffers they share.
#[derive(Clone, Debug, Default)]
pub struct GpuLaunch {
    /// Dispatches, in order.
    pub kernels: Vec<Kernel>,
    /// Elements (f32) of each scratch buffer.
    pub scratch: Vec<usize>,
}

impl From<Kernel> for GpuLaunch {
    fn from(k: Kernel) -> Self {
        GpuLaunch { kernels: vec![k], scratch: vec![] }
    }
}

/// One operation of the graph.
pub trait Op: Debug + Send + Sync + Any {
    /// Short name: reports group by it.
    fn name(&self) -> &'static str;

    /// The shape rule.
    ///
    /// # Panics
    /// If the inputs do not fit: a bug in the model builder, which validates configurations first.
    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape>;

    /// The storage types of so many outputs, of the inputs' types. An operation reads and writes 32 bits unless it says
    /// otherwise.
    ///
    /// # Panics
    /// If it cannot read an input stored so.
    fn storage(&self, inputs: &[DType], outputs: usize) -> Vec<DType> {
        let half = inputs.iter().find(|d| d.is_half());
        assert!(half.is_none(), "{} does not read {half:?}: put a cast before it", self.name());
        vec![DType::F32; outputs]
    }

    /// The form of the outputs, of the inputs' forms; only an operation that keeps rows apart has another than the whole.
    fn form(&self, _: &[Form]) -> Form {
        Form::Whole
    }

    /// Floating-point operations. Bytes default to reading every input and writing every output once.
    fn flops(&self, inputs: &[Shape], outputs: &[Shape]) -> f64;

    /// Bytes moved otherwise than "each input read once, each output written once" are declared here.
    fn cost(&self, inputs: &[ValueType], outputs: &[ValueType]) -> Cost {
        let bytes = |v: &[ValueType]| v.iter().map(|v| v.bytes_of(v.shape.len())).sum();
        Cost {
            flops: self.flops(&shapes(inputs), &shapes(outputs)),
            read: bytes(inputs),
            written: bytes(outputs),
        }
    }

    /// Appends the backward operations and returns the gradient of each wanted input.
    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>>;

    /// Inputs (states) that the operation updates in place.
    fn mutates(&self) -> &'static [usize] {
        &[]
    }

    /// Pairs (input, output) of equal size that may share one buffer: the operation reads element `i` of
    /// the input before it writes element `i` of the output, and never reads it again.
    fn may_alias(&self) -> Vec<(usize, usize)> {
        vec![]
    }

    /// The pairs that also share on the device, where the shader must bind the buffer only once.
    fn may_alias_gpu(&self) -> Vec<(usize, usize)> {
        self.may_alias()
    }

    /// The same operation with one more input, added to output 0, if it has such a form.
    fn with_accumulate(&self) -> Option<Box<dyn Op>> {
        None
    }

    /// The host's work, of operations that are no computation of the device.
    fn host(&self) -> Option<&std::sync::Arc<dyn host::HostWork>> {
        None
    }

    /// Runs on the CPU in f32.
    fn cpu32(&self, c: &mut Cpu<'_, f32>);
    /// Runs on the CPU in f64.
    fn cpu64(&self, c: &mut Cpu<'_, f64>);

    /// The shader launches.
    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch;
}

/// The shapes alone.
pub(crate) fn shapes(types: &[ValueType]) -> Vec<Shape> {
    types.iter().map(|t| t.shape).collect()
}

/// The bytes of a uniform block in WGSL layout.
pub fn uniform<T: encase::ShaderType + encase::internal::WriteInto>(params: &T) -> Vec<u8> {
    let mut b = encase::StorageBuffer::new(Vec::new());
    b.write(params).expect("a vector grows");
    b.into_inner()
}

/// Both precisions from one generic `fn run<T: Real>(&self, c: &mut Cpu<'_, T>)`.
#[macro_export]
macro_rules! cpu_both {
    () => {
        fn cpu32(&self, c: &mut $crate::ops::Cpu<'_, f32>) {
            self.run(c)
        }
        // f64 is for tests: the page does without it, and is the smaller for it
        #[cfg(not(target_arch = "wasm32"))]
        fn cpu64(&self, c: &mut $crate::ops::Cpu<'_, f64>) {
            self.run(c)
        }
        #[cfg(target_arch = "wasm32")]
        fn cpu64(&self, _: &mut $crate::ops::Cpu<'_, f64>) {
            unreachable!("f64 programs are not made here")
        }
    };
}
