//! `map`: one fused elementwise pass. `y[i] = expr(x0[access0(i)], x1[access1(i)], …)`.
//!
//! The graph builder makes one small map an arithmetic operation; the fusion pass inlines chains of them, so
//! that `relu(a·b + c)` is one dispatch. The WGSL is generated from the expression; sizes go through the
//! uniform block, so equal expressions over different sizes share one pipeline.

use super::access::{Access, param};
use super::expr::{BLOCK, Bin, Expr, Un};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Form, Graph, Shape, Tensor};
use crate::par::*;
use std::fmt::Write;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Map {
    /// What to compute.
    pub expr: Expr,
    /// How each input is read.
    pub access: Vec<Access>,
    /// Shape of the output.
    pub shape: Shape,
}

impl Map {
    /// An expression over inputs that broadcast to a common shape.
    ///
    /// # Panics
    /// If they do not.
    pub fn broadcast(expr: Expr, inputs: &[Shape]) -> Self {
        let shape = inputs[1..].iter().fold(inputs[0], |s, t| {
            s.broadcast(t).unwrap_or_else(|| panic!("shapes {inputs:?} do not broadcast"))
        });
        Map { expr, access: inputs.iter().map(|&s| Access::broadcast(s, shape)).collect(), shape }
    }

    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        struct Src<T>(Vec<(*const T, usize)>);
        // SAFETY: the pointers are only read, each from the threads of this call.
        unsafe impl<T> Sync for Src<T> {}
        impl<T> Src<T> {
            fn get(&self, i: usize) -> *const T {
                self.0[i].0
            }
        }
        let src = Src((0..self.access.len()).map(|i| c.input_raw(i)).collect());
        for (a, (_, n)) in self.access.iter().zip(&src.0) {
            let reach: usize =
                a.offset + a.dims.iter().zip(&a.strides).map(|(d, s)| (d - 1) * s).sum::<usize>();
            assert!(reach < *n, "map reads beyond its input");
        }
        let out = c.output(0);
        let root = self.expr.ins.len() - 1;
        const TASK: usize = 32 * BLOCK;
        out.par_chunks_mut(TASK).enumerate().for_each(|(t, chunk)| {
            T::simd(
                #[inline(always)]
                || {
                    let mut regs: Vec<[T; BLOCK]> = Vec::new();
                    for (k, block) in chunk.chunks_mut(BLOCK).enumerate() {
                        let start = t * TASK + k * BLOCK;
                        let n = block.len();
                        self.expr.eval(n, &mut regs, |i, r| {
                            // SAFETY: reach was checked above for every output element. An input that shares
                            // the output's buffer is read here, before this block is written, and only at the
                            // block's own elements (`may_alias` lists only identity accesses).
                            unsafe { self.access[i].load(src.get(i), start, r) }
                        });
                        block.copy_from_slice(&regs[root][..n]);
                    }
                },
            )
        });
    }
}

impl Op for Map {
    fn name(&self) -> &'static str {
        "map"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs.len(), self.access.len());
        vec![self.shape]
    }

    /// Rows of a table stay such beside numbers and rows of the same.
    fn form(&self, inputs: &[Form]) -> Form {
        let mut forms = inputs.iter().zip(&self.access).filter(|(_, a)| !a.is_scalar()).map(|(f, _)| *f);
        let first = forms.next().unwrap_or_default();
        if forms.all(|f| f == first) { first } else { Form::Whole }
    }

    fn flops(&self, _: &[Shape], outputs: &[Shape]) -> f64 {
        (self.expr.flops() * outputs[0].len()) as f64
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let n = v.inputs.len();
        let dy = v.grads[0].expect("called with a gradient");
        (0..n)
            .map(|i| {
                if !v.wanted[i] {
                    return None;
                }
                let d = self.expr.derivative(i, n, n + 1)?;
                // operands: the inputs, the gradient, the output; only those that are used
                let all: Vec<(Tensor, Access)> = v
                    .inputs
                    .iter()
                    .copied()
                    .zip(self.access.iter().cloned())
                    .chain([
                        (dy, Access::same(self.shape.len())),
                        (v.outputs[0], Access::same(self.shape.len())),
                    ])
                    .collect();
                let full = g.map_access(&d, &all, self.shape);
                Some(g.reduce_access(full, &self.access[i], v.inputs[i].shape()))
            })
            .collect()
    }

    fn may_alias(&self) -> Vec<(usize, usize)> {
        (0..self.access.len()).filter(|&i| self.access[i].is_same()).map(|i| (i, 0)).collect()
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let len = self.shape.len();
        let vec4 = len.is_multiple_of(4) && self.access.iter().all(Access::vec4);
        let unit = if vec4 { 4 } else { 1 };
        let ty = if vec4 { "vec4<f32>" } else { "f32" };
        let mut params = vec![(len / unit) as u32];
        let mut decl = String::new();
        let mut bindings = vec![];
        let mut args = vec![];
        let aliased = r.in_place.map(|(i, _)| i);
        for (i, a) in self.access.iter().enumerate() {
            let index = a.wgsl_index("i", params.len());
            params.extend(a.params(unit));
            if aliased == Some(i) {
                args.push("y[i]".to_string());
                continue;
            }
            // one value for four outputs is read as a scalar and spread
            let elem = if vec4 && !a.inner_repeats() { "vec4<f32>" } else { "f32" };
            let b = bindings.len();
            let _ = writeln!(decl, "@group(0) @binding({b}) var<storage, read> x{i} : array<{elem}>;");
            bindings.push(Bind::In(i));
            args.push(if elem == ty {
                format!("x{i}[{index}]")
            } else {
                format!("vec4<f32>(x{i}[{index}])")
            });
        }
        let b = bindings.len();
        let _ = writeln!(decl, "@group(0) @binding({b}) var<storage, read_write> y : array<{ty}>;");
        bindings.push(Bind::Out(0));
        while params.len() % 4 != 0 {
            params.push(0);
        }
        let (body, value) = self.expr.wgsl(ty, "r", |i| args[i].clone());
        let source = format!(
            "struct P {{ v : array<vec4<u32>, {}> }}\n{decl}@group(0) @binding({}) var<uniform> p : P;\n\
             @compute @workgroup_size(64)\n\
             fn main(@builtin(workgroup_id) wg : vec3<u32>, @builtin(num_workgroups) nw : vec3<u32>, \
             @builtin(local_invocation_index) li : u32) {{\n    \
             let i = (wg.x + wg.y * nw.x) * 64u + li;\n    if (i >= {}) {{ return; }}\n{body}    y[i] = {value};\n}}\n",
            params.len() / 4,
            bindings.len(),
            param(0),
        );
        Kernel {
            label: "map".into(),
            source: source.into(),
            entry: "main",
            constants: vec![],
            bindings,
            params: bytemuck::cast_slice(&params).to_vec(),
            groups: fold_groups((len / unit).div_ceil(64) as u64),
        }
        .into()
    }
}

/// Elementwise building blocks. All broadcast as numpy does.
impl Graph {
    /// Any expression over inputs that broadcast together.
    pub fn map(&mut self, expr: Expr, inputs: &[Tensor]) -> Tensor {
        let shapes: Vec<Shape> = inputs.iter().map(Tensor::shape).collect();
        self.push(Map::broadcast(expr, &shapes), inputs)
    }

    /// An expression over inputs with explicit accesses; unused inputs are dropped.
    pub(crate) fn map_access(&mut self, expr: &Expr, all: &[(Tensor, Access)], shape: Shape) -> Tensor {
        let used = expr.used_inputs();
        if used.is_empty() {
            // a constant gradient: give the map one input to stand on
            let m = Map { expr: expr.clone(), access: vec![], shape };
            return self.push(m, &[]);
        }
        let at = |k: usize| used.iter().position(|&u| u == k).expect("listed");
        let op =
            Map { expr: expr.renumber(at), access: used.iter().map(|&k| all[k].1.clone()).collect(), shape };
        let inputs: Vec<Tensor> = used.iter().map(|&k| all[k].0).collect();
        self.push(op, &inputs)
    }

    fn bin(&mut self, b: Bin, x: Tensor, y: Tensor) -> Tensor {
        self.map(Expr::binary(b), &[x, y])
    }

    /// x + y
    pub fn add(&mut self, x: Tensor, y: Tensor) -> Tensor {
        self.bin(Bin::Add, x, y)
    }

    /// x - y
    pub fn sub(&mut self, x: Tensor, y: Tensor) -> Tensor {
        self.bin(Bin::Sub, x, y)
    }

    /// x · y, elementwise
    pub fn mul(&mut self, x: Tensor, y: Tensor) -> Tensor {
        self.bin(Bin::Mul, x, y)
    }

    /// x / y, elementwise
    pub fn div(&mut self, x: Tensor, y: Tensor) -> Tensor {
        self.bin(Bin::Div, x, y)
    }

    /// One function of each element.
    pub fn unary(&mut self, u: Un, x: Tensor) -> Tensor {
        self.map(Expr::unary(u), &[x])
    }

    /// max(x, 0)
    pub fn relu(&mut self, x: Tensor) -> Tensor {
        self.unary(Un::Relu, x)
    }

    /// a·x + b with numbers a, b
    pub fn affine(&mut self, x: Tensor, a: f64, b: f64) -> Tensor {
        let mut e = Expr::input(0);
        let a = e.num(a);
        let p = e.bin(Bin::Mul, 0, a);
        let b = e.num(b);
        let q = e.bin(Bin::Add, p, b);
        self.map(e.finish(q), &[x])
    }

    /// The same values under another shape; costs nothing.
    ///
    /// # Panics
    /// If the number of elements differs.
    pub fn reshape(&mut self, x: Tensor, shape: impl Into<Shape>) -> Tensor {
        x.reshaped(shape.into())
    }
}
