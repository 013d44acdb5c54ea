//! Operation by operation: the forward graph in ONNX's own operators (opset 17).
//!
//! The same graph comes twice, built for two batch sizes ([`super::dims`]); node `i` of one is node `i` of the
//! other. Values carry the shape in which they were made; whoever reads one in another shape reshapes it.

use super::dims::{Dim, Dims};
use super::emit::{Emitter, Val};
use super::proto::{AttributeProto, DOUBLE, FLOAT};
use crate::graph::{Graph, Node, Source, Tensor};
use crate::model::build::Model;
use crate::model::params::Kind;
use crate::ops::access::Access;
use crate::ops::attention::Attention;
use crate::ops::concat::Concat;
use crate::ops::conv2d::Conv2d;
use crate::ops::embedding::{Gather, Pool, PooledGather};
use crate::ops::expr::{Bin, Ins, Un};
use crate::ops::fm::Fm;
use crate::ops::layer_norm::{self, LayerNorm};
use crate::ops::map::Map;
use crate::ops::matmul::Matmul;
use crate::ops::mhc_project::MhcProject;
use crate::ops::pairwise::Pairwise;
use crate::ops::permute::Permute;
use crate::ops::reduce::ReduceSum;
use crate::ops::rms_norm::RmsNorm;
use crate::ops::sinkhorn::Sinkhorn;
use crate::ops::slice::Slice;
use crate::ops::softmax::Softmax;
use crate::ops::stream_aggregate::StreamAggregate;
use crate::ops::stream_merge::StreamMerge;
use std::any::Any;
use std::collections::HashMap;

/// What cannot be written as ONNX, in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}; this model cannot be exported to ONNX, export it as safetensors")]
pub struct TranslateError {
    place: String,
    problem: String,
}

type Result<T> = std::result::Result<T, TranslateError>;

/// An input of the exported model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// `numeric`: float `[batch, n]`.
    Numeric(usize),
    /// `ids`: integers `[batch, n]`, the single-valued categorical columns.
    Ids(usize),
    /// `{name}.ids` `[items]` and `{name}.offsets` `[bags·batch + 1]`: a multi-valued column, or the columns of one
    /// table, an example's bags one after the other.
    Bag {
        /// The column that owns the table.
        name: String,
        /// Bags of an example.
        bags: usize,
    },
}

/// The translated graph.
pub struct Translated {
    /// Nodes and constants.
    pub emitter: Emitter,
    /// Inputs in use.
    pub inputs: Vec<Input>,
    /// Names of the weights in use.
    pub weights: Vec<String>,
}

/// A node in both graphs.
struct Pair<'a> {
    nodes: [&'a Node; 2],
}

impl<'a> Pair<'a> {
    /// The operation, if it is a `T`.
    fn op<T: 'static>(&self) -> Option<[&'a T; 2]> {
        let [a, b] = self.nodes.map(|n| {
            let op: &dyn Any = n.op.as_ref();
            op.downcast_ref::<T>()
        });
        Some([a?, b?])
    }

    fn fail<T>(&self, problem: impl Into<String>) -> Result<T> {
        let n = self.nodes[0];
        Err(TranslateError { place: format!("{} ({})", n.op.name(), n.scope), problem: problem.into() })
    }

    fn or<T>(&self, v: Option<T>, problem: &str) -> Result<T> {
        v.map_or_else(|| self.fail(problem), Ok)
    }

    /// Shape in which the node reads input `i`.
    fn input_dims(&self, i: usize) -> Result<Dims> {
        let [a, b] = self.nodes.map(|n| n.inputs[i].shape());
        self.or(Dims::of_shapes(a, b), "a shape that is no multiple of the batch")
    }

    fn output_dims(&self, i: usize) -> Result<Dims> {
        let [a, b] = self.nodes.map(|n| n.outputs[i].shape());
        self.or(Dims::of_shapes(a, b), "a shape that is no multiple of the batch")
    }

    fn dim(&self, sizes: [usize; 2]) -> Result<Dim> {
        self.or(Dim::of(sizes), "a size that is no multiple of the batch")
    }

    /// How many rows of `per` elements a shape has.
    fn rows(&self, dims: &Dims, per: usize) -> Result<Dim> {
        match dims.len() {
            Some(Dim::Fixed(n)) if n.is_multiple_of(per) => Ok(Dim::Fixed(n / per)),
            Some(Dim::Batch(n)) if n.is_multiple_of(per) => Ok(Dim::Batch(n / per)),
            _ => self.fail(format!("rows of {per} elements in {dims}")),
        }
    }
}

struct Translator<'a> {
    models: [&'a Model; 2],
    e: Emitter,
    /// By position in the graph's list of values.
    values: HashMap<usize, Val>,
    inputs: Vec<Input>,
    weights: Vec<String>,
    /// `[batch, 1]` ids of every single-valued column, in order.
    ids: Vec<String>,
}

/// Translates what the logits need. `models` are of the batch sizes [`super::dims::BATCHES`]. The graph's
/// outputs are named `logit` and `score`.
pub fn translate(models: [&Model; 2]) -> Result<Translated> {
    let mut t = Translator {
        models,
        e: Emitter::default(),
        values: HashMap::new(),
        inputs: vec![],
        weights: vec![],
        ids: vec![],
    };
    let graphs: [&Graph; 2] = models.map(|m| &m.graph);
    assert_eq!(graphs[0].nodes().len(), graphs[1].nodes().len(), "one structure for every batch size");
    for n in crate::graph::plan::live_nodes(graphs[0], &[models[0].logits]) {
        let pair = Pair { nodes: graphs.map(|g| &g.nodes()[n]) };
        assert_eq!(pair.nodes[0].op.name(), pair.nodes[1].op.name(), "one structure for every batch size");
        t.e.scope = pair.nodes[0].scope.to_string();
        t.node(&pair)?;
    }
    t.e.scope = "output".into();
    let logits = t.value(models.map(|m| m.logits))?;
    let (at, len) = (t.e.nodes.len(), t.e.nodes.len() + 2);
    t.e.call("Identity", &[&logits.name]);
    t.e.call("Sigmoid", &["logit"]);
    for (node, name) in t.e.nodes[at..len].iter_mut().zip(["logit", "score"]) {
        node.output = vec![name.into()];
    }
    Ok(Translated { emitter: t.e, inputs: t.inputs, weights: t.weights })
}

impl Translator<'_> {
    /// A value in the shape of its handles.
    fn value(&mut self, t: [Tensor; 2]) -> Result<Val> {
        let graph = &self.models[0].graph;
        let place = || graph.describe(t[0]);
        let fail = |problem: &str| TranslateError { place: place(), problem: problem.into() };
        let dims = Dims::of_shapes(t[0].shape(), t[1].shape())
            .ok_or_else(|| fail("a shape that is no multiple of the batch"))?;
        let index = t[0].index();
        let base = match self.values.get(&index) {
            Some(v) => v.clone(),
            None => {
                let v = graph.value(t[0]);
                let name = match &v.source {
                    Source::Const(data) => self.e.floats(&v.shape.dims(), data),
                    Source::State(id) => {
                        let name = id.to_string();
                        self.weights.push(name.clone());
                        name
                    }
                    Source::Input(id) if *id == "numeric".into() => {
                        self.inputs.push(Input::Numeric(v.shape.last()));
                        id.to_string()
                    }
                    _ => return Err(fail("an input that serving does not have")),
                };
                let other = self.models[1].graph.value(t[1]).shape;
                let dims = Dims::of_shapes(v.shape, other)
                    .ok_or_else(|| fail("a shape that is no multiple of the batch"))?;
                let v = Val::new(name, dims);
                self.values.insert(index, v.clone());
                v
            }
        };
        self.e.reshape(&base, &dims).ok_or_else(|| fail("the batch in two axes"))
    }

    fn input(&mut self, n: &Pair<'_>, i: usize) -> Result<Val> {
        self.value(n.nodes.map(|n| n.inputs[i]))
    }

    fn input_as(&mut self, n: &Pair<'_>, i: usize, dims: &[Dim]) -> Result<Val> {
        let v = self.input(n, i)?;
        self.shaped(n, &v, dims)
    }

    fn shaped(&mut self, n: &Pair<'_>, v: &Val, dims: &[Dim]) -> Result<Val> {
        let to = Dims(dims.to_vec());
        let v = self.e.reshape(v, &to);
        n.or(v, "the batch in two axes")
    }

    fn set(&mut self, n: &Pair<'_>, output: usize, v: Val) {
        self.values.insert(n.nodes[0].outputs[output].index(), v);
    }

    /// Sets output `output` to the value named so, in the shape that the graph declares.
    fn set_whole(&mut self, n: &Pair<'_>, output: usize, name: String) -> Result<()> {
        let dims = n.output_dims(output)?;
        self.set(n, output, Val::new(name, dims));
        Ok(())
    }

    fn node(&mut self, n: &Pair<'_>) -> Result<()> {
        if let Some(op) = n.op::<Map>() {
            self.map(n, op)
        } else if let Some(op) = n.op::<Matmul>() {
            self.matmul(n, op)
        } else if n.op::<LayerNorm>().is_some() {
            self.layer_norm(n)
        } else if let Some([op, _]) = n.op::<RmsNorm>() {
            self.rms_norm(n, op)
        } else if let Some([op, _]) = n.op::<Attention>() {
            self.attention(n, op)
        } else if let Some([op, _]) = n.op::<Sinkhorn>() {
            self.sinkhorn(n, op)
        } else if n.op::<MhcProject>().is_some() {
            self.mhc_project(n)
        } else if n.op::<StreamAggregate>().is_some() {
            self.stream_aggregate(n)
        } else if n.op::<StreamMerge>().is_some() {
            self.stream_merge(n)
        } else if n.op::<Pairwise>().is_some() {
            self.pairwise(n)
        } else if n.op::<Fm>().is_some() {
            self.fm(n)
        } else if n.op::<Conv2d>().is_some() {
            self.conv2d(n)
        } else if n.op::<Gather>().is_some() {
            self.gather(n)
        } else if let Some([op, _]) = n.op::<PooledGather>() {
            self.pooled_gather(n, op)
        } else if let Some(op) = n.op::<ReduceSum>() {
            self.reduce_sum(n, op)
        } else if let Some([op, _]) = n.op::<Concat>() {
            let parts = (0..n.nodes[0].inputs.len()).map(|i| self.input(n, i)).collect::<Result<Vec<_>>>()?;
            let names: Vec<&str> = parts.iter().map(|v| v.name.as_str()).collect();
            let y = self.e.node("Concat", &names, vec![AttributeProto::int("axis", op.axis as i64)]);
            self.set_whole(n, 0, y)
        } else if let Some([op, _]) = n.op::<Slice>() {
            let x = self.input(n, 0)?;
            let [from, to, axis] = [op.start, op.start + op.len, op.axis].map(|v| self.e.ints(&[v as i64]));
            let y = self.e.call("Slice", &[&x.name, &from, &to, &axis]);
            self.set_whole(n, 0, y)
        } else if let Some([op, _]) = n.op::<Permute>() {
            let x = self.input(n, 0)?;
            let perm: Vec<i64> = op.axes.iter().map(|&a| a as i64).collect();
            let y = self.e.transpose(&x, &perm);
            self.set(n, 0, y);
            Ok(())
        } else if n.op::<Softmax>().is_some() {
            let x = self.input(n, 0)?;
            let y = self.e.node("Softmax", &[&x.name], vec![AttributeProto::int("axis", -1)]);
            self.set_whole(n, 0, y)
        } else {
            n.fail("this operation has no ONNX form yet")
        }
    }

    /// An elementwise expression: one ONNX node an instruction (runtimes fuse them again).
    fn map(&mut self, n: &Pair<'_>, op: [&Map; 2]) -> Result<()> {
        let to = n.output_dims(0)?;
        let mut args = vec![];
        for i in 0..n.nodes[0].inputs.len() {
            let broadcasts = (0..2).all(|k| {
                let from = n.nodes[k].inputs[i].shape();
                from.broadcast(&op[k].shape) == Some(op[k].shape)
                    && op[k].access[i] == Access::broadcast(from, op[k].shape)
            });
            args.push(if broadcasts {
                self.input(n, i)?
            } else {
                self.repeated(n, i, [&op[0].access[i], &op[1].access[i]], &to)?
            });
        }
        let mut regs: Vec<Val> = vec![];
        for ins in &op[0].expr.ins {
            let v = match *ins {
                Ins::In(i) => args[i as usize].clone(),
                Ins::Const(c) => Val::new(self.e.scalar(c), Dims(vec![])),
                Ins::Un(u, a) => {
                    let x = regs[a as usize].clone();
                    Val::new(self.unary(u, &x.name), x.dims)
                }
                Ins::Bin(b, x, y) => {
                    let (x, y) = (&regs[x as usize], &regs[y as usize]);
                    let dims = n.or(x.dims.broadcast(&y.dims), "operands that do not broadcast")?;
                    let name = match b {
                        Bin::Add => "Add",
                        Bin::Sub => "Sub",
                        Bin::Mul => "Mul",
                        Bin::Div => "Div",
                        Bin::Max => "Max",
                        Bin::Min => "Min",
                    };
                    Val::new(self.e.call(name, &[&x.name, &y.name]), dims)
                }
            };
            regs.push(v);
        }
        let y = n.or(regs.pop(), "an empty expression")?;
        if y.dims != to {
            return n.fail(format!("an expression of shape {} where {to} is due", y.dims));
        }
        self.set(n, 0, y);
        Ok(())
    }

    fn unary(&mut self, u: Un, x: &str) -> String {
        let name = match u {
            Un::Neg => "Neg",
            Un::Exp => "Exp",
            Un::Ln => "Log",
            Un::Sqrt => "Sqrt",
            Un::Recip => "Reciprocal",
            Un::Relu => "Relu",
            Un::Sigmoid => "Sigmoid",
            Un::Tanh => "Tanh",
            Un::Softplus => "Softplus",
            Un::Rsqrt => {
                let root = self.e.call("Sqrt", &[x]);
                return self.e.call("Reciprocal", &[&root]);
            }
            Un::Step => {
                let zero = self.e.scalar(0.0);
                let positive = self.e.call("Greater", &[x, &zero]);
                return self.e.node("Cast", &[&positive], vec![AttributeProto::int("to", FLOAT.into())]);
            }
        };
        self.e.call(name, &[x])
    }

    /// An input whose elements are repeated along axes that its own shape does not have.
    fn repeated(&mut self, n: &Pair<'_>, i: usize, access: [&Access; 2], to: &Dims) -> Result<Val> {
        let dims = n.or(Dims::of(&access[0].dims, &access[1].dims), "an access that is no multiple")?;
        let mut step = 1;
        let a = access[0];
        let in_order = (0..a.dims.len()).rev().all(|k| {
            let ok = a.strides[k] == 0 || a.strides[k] == step;
            step *= if a.strides[k] == 0 { 1 } else { a.dims[k] };
            ok
        });
        if !in_order || access.iter().any(|a| a.offset != 0) {
            return n.fail("an access that is neither a broadcast nor a repetition");
        }
        let kept = |k: usize| a.strides[k] != 0;
        let narrow: Vec<Dim> =
            (0..dims.rank()).map(|k| if kept(k) { dims.0[k] } else { Dim::Fixed(1) }).collect();
        // 1 leaves an axis as it is
        let wide = (0..dims.rank()).map(|k| match (kept(k), dims.0[k]) {
            (true, _) => Ok(1),
            (false, Dim::Fixed(s)) => Ok(s as i64),
            (false, Dim::Batch(_)) => n.fail("a repetition along the batch"),
        });
        let wide = wide.collect::<Result<Vec<i64>>>()?;
        let x = self.input_as(n, i, &narrow)?;
        let shape = self.e.ints(&wide);
        let y = Val::new(self.e.call("Expand", &[&x.name, &shape]), dims);
        self.shaped(n, &y, &to.0)
    }

    fn matmul(&mut self, n: &Pair<'_>, op: [&Matmul; 2]) -> Result<()> {
        let s = &op[0].spec;
        if s.reduce_batch || s.accumulate.is_some() || op[0].epilogue.is_some() {
            return n.fail("a product of the backward pass");
        }
        let size = |f: fn(&Matmul) -> u32| n.dim(op.map(|o| f(o) as usize));
        let (batch, m, c, k) =
            (size(|o| o.spec.batch)?, size(|o| o.spec.m)?, size(|o| o.spec.n)?, size(|o| o.spec.k)?);
        let operand = |batched: bool, trans: bool, rows: Dim, cols: Dim| {
            let mut d = if batched { vec![batch] } else { vec![] };
            d.extend(if trans { [cols, rows] } else { [rows, cols] });
            d
        };
        let a = self.input_as(n, 0, &operand(s.a_batched, s.trans_a, m, k))?;
        let b = self.input_as(n, 1, &operand(s.b_batched, s.trans_b, k, c))?;
        let mut swapped = |v: Val, trans: bool| match (trans, v.dims.rank()) {
            (false, _) => v,
            (true, 2) => self.e.transpose(&v, &[1, 0]),
            (true, _) => self.e.transpose(&v, &[0, 2, 1]),
        };
        let (a, b) = (swapped(a, s.trans_a), swapped(b, s.trans_b));
        let mut dims = if s.a_batched || s.b_batched { vec![batch] } else { vec![] };
        dims.extend([m, c]);
        let y = Val::new(self.e.call("MatMul", &[&a.name, &b.name]), Dims(dims));
        self.set(n, 0, y);
        Ok(())
    }

    /// The mean is subtracted first: rows of 16 elements about 300 come out of onnxruntime 1.32 wrong by 3e-5
    /// without that, by 3e-7 with it.
    fn layer_norm(&mut self, n: &Pair<'_>) -> Result<()> {
        let (x, gamma, beta) = (self.input(n, 0)?, self.input(n, 1)?, self.input(n, 2)?);
        let axes = vec![AttributeProto::ints("axes", &[-1]), AttributeProto::int("keepdims", 1)];
        let mean = self.e.node("ReduceMean", &[&x.name], axes);
        let centred = self.e.call("Sub", &[&x.name, &mean]);
        let attributes =
            vec![AttributeProto::int("axis", -1), AttributeProto::float("epsilon", layer_norm::EPS)];
        let y = self.e.node("LayerNormalization", &[&centred, &gamma.name, &beta.name], attributes);
        self.set_whole(n, 0, y)
    }

    fn mean_square(&mut self, x: &str) -> String {
        let square = self.e.call("Mul", &[x, x]);
        let axes = vec![AttributeProto::ints("axes", &[-1]), AttributeProto::int("keepdims", 1)];
        self.e.node("ReduceMean", &[&square], axes)
    }

    fn rms_norm(&mut self, n: &Pair<'_>, op: &RmsNorm) -> Result<()> {
        let x = self.input(n, 0)?;
        let ms = self.mean_square(&x.name);
        let eps = self.e.scalar(op.eps);
        let ms = self.e.call("Add", &[&ms, &eps]);
        let root = self.e.call("Sqrt", &[&ms]);
        let mut y = self.e.call("Div", &[&x.name, &root]);
        if op.weight {
            let w = self.input(n, 1)?;
            y = self.e.call("Mul", &[&y, &w.name]);
        }
        self.set_whole(n, 0, y)
    }

    fn attention(&mut self, n: &Pair<'_>, op: &Attention) -> Result<()> {
        let x = n.input_dims(0)?;
        let split = [x.0[0], x.0[1], Dim::Fixed(op.dims.heads), Dim::Fixed(op.dims.dk)];
        let [q, k, v] = [0, 1, 2].map(|i| self.input_as(n, i, &split));
        let (q, v) = (self.e.transpose(&q?, &[0, 2, 1, 3]), self.e.transpose(&v?, &[0, 2, 1, 3]));
        let k = self.e.transpose(&k?, &[0, 2, 3, 1]);
        let scores = self.e.call("MatMul", &[&q.name, &k.name]);
        let scale = self.e.scalar(op.dims.scale());
        let scores = self.e.call("Mul", &[&scores, &scale]);
        let weights = self.e.node("Softmax", &[&scores], vec![AttributeProto::int("axis", -1)]);
        let o = Val::new(self.e.call("MatMul", &[&weights, &v.name]), q.dims);
        let o = self.e.transpose(&o, &[0, 2, 1, 3]);
        self.set(n, 0, o);
        Ok(())
    }

    /// In the log domain, iteration by iteration.
    fn sinkhorn(&mut self, n: &Pair<'_>, op: &Sinkhorn) -> Result<()> {
        let mut z = self.input(n, 0)?.name;
        for _ in 0..op.iterations {
            for axis in [-2, -1] {
                let axes = vec![AttributeProto::ints("axes", &[axis]), AttributeProto::int("keepdims", 1)];
                let sum = self.e.node("ReduceLogSumExp", &[&z], axes);
                z = self.e.call("Sub", &[&z, &sum]);
            }
        }
        let y = self.e.call("Exp", &[&z]);
        self.set_whole(n, 0, y)
    }

    /// Streams n and width d of `[.., n, d]`, and the number of tokens.
    fn streams(&self, n: &Pair<'_>) -> Result<(Dim, usize, usize)> {
        let s = n.nodes[0].inputs[0].shape();
        let (streams, d) = (s.dim(s.rank() - 2), s.last());
        Ok((n.rows(&n.input_dims(0)?, streams * d)?, streams, d))
    }

    fn mhc_project(&mut self, n: &Pair<'_>) -> Result<()> {
        let (t, s, d) = self.streams(n)?;
        let v = self.input_as(n, 0, &[t, Dim::Fixed(s * d)])?;
        let phi = self.input(n, 1)?;
        let raw = self.e.call("MatMul", &[&v.name, &phi.name]);
        let sizes = self.e.ints(&[s, s, s * s].map(|x| x as i64));
        let parts = self.e.nodes("Split", &[&raw, &sizes], 3, vec![AttributeProto::int("axis", 1)]);
        for (i, (part, width)) in parts.into_iter().zip([s, s, s * s]).enumerate() {
            self.set(n, i, Val::new(part, Dims(vec![t, Dim::Fixed(width)])));
        }
        let ms = self.mean_square(&v.name);
        self.set(n, 3, Val::new(ms, Dims(vec![t, Dim::Fixed(1)])));
        Ok(())
    }

    fn stream_aggregate(&mut self, n: &Pair<'_>) -> Result<()> {
        let (t, s, d) = self.streams(n)?;
        let x = self.input_as(n, 0, &[t, Dim::Fixed(s), Dim::Fixed(d)])?;
        let pre = self.input_as(n, 1, &[t, Dim::Fixed(1), Dim::Fixed(s)])?;
        let u = self.e.call("MatMul", &[&pre.name, &x.name]);
        self.set(n, 0, Val::new(u, Dims(vec![t, Dim::Fixed(1), Dim::Fixed(d)])));
        Ok(())
    }

    fn stream_merge(&mut self, n: &Pair<'_>) -> Result<()> {
        let (t, s, d) = self.streams(n)?;
        let whole = [t, Dim::Fixed(s), Dim::Fixed(d)];
        let x = self.input_as(n, 0, &whole)?;
        let f = self.input_as(n, 1, &[t, Dim::Fixed(1), Dim::Fixed(d)])?;
        let res = self.input_as(n, 2, &[t, Dim::Fixed(s), Dim::Fixed(s)])?;
        let post = self.input_as(n, 3, &[t, Dim::Fixed(s), Dim::Fixed(1)])?;
        let carried = self.e.call("MatMul", &[&res.name, &x.name]);
        let added = self.e.call("Mul", &[&post.name, &f.name]);
        let y = self.e.call("Add", &[&carried, &added]);
        self.set(n, 0, Val::new(y, Dims(whole.to_vec())));
        Ok(())
    }

    fn pairwise(&mut self, n: &Pair<'_>) -> Result<()> {
        let x = self.input(n, 0)?;
        let m = n.nodes[0].inputs[0].dim(1);
        let y = self.e.transpose(&x, &[0, 2, 1]);
        let gram = self.e.call("MatMul", &[&x.name, &y.name]);
        let gram = Val::new(gram, Dims(vec![x.dims.0[0], x.dims.0[1], x.dims.0[1]]));
        let flat = self.shaped(n, &gram, &[x.dims.0[0], Dim::Fixed(m * m)])?;
        let upper: Vec<i64> = (0..m).flat_map(|i| (i..m).map(move |j| (i * m + j) as i64)).collect();
        let upper = self.e.ints(&upper);
        let y = self.e.node("Gather", &[&flat.name, &upper], vec![AttributeProto::int("axis", 1)]);
        self.set_whole(n, 0, y)
    }

    fn fm(&mut self, n: &Pair<'_>) -> Result<()> {
        let x = self.input(n, 0)?;
        let axis = self.e.ints(&[1]);
        let drop = || vec![AttributeProto::int("keepdims", 0)];
        let sum = self.e.node("ReduceSum", &[&x.name, &axis], drop());
        let square = self.e.call("Mul", &[&x.name, &x.name]);
        let squares = self.e.node("ReduceSum", &[&square, &axis], drop());
        let sum2 = self.e.call("Mul", &[&sum, &sum]);
        let pairs = self.e.call("Sub", &[&sum2, &squares]);
        let half = self.e.scalar(0.5);
        let y = self.e.call("Mul", &[&pairs, &half]);
        self.set_whole(n, 0, y)
    }

    fn conv2d(&mut self, n: &Pair<'_>) -> Result<()> {
        let x = n.input_dims(0)?;
        let k = n.nodes[0].inputs[1].shape();
        let image = self.input_as(n, 0, &[x.0[0], Dim::Fixed(1), x.0[1], x.0[2]])?;
        let [channels, km, kd] = [k.dim(0), k.dim(1), k.dim(2)];
        let filters = self.input_as(n, 1, &[channels, 1, km, kd].map(Dim::Fixed))?;
        let (um, ud) = ((km / 2) as i64, (kd / 2) as i64);
        let pads = AttributeProto::ints("pads", &[um, ud, um, ud]);
        let y = self.e.node("Conv", &[&image.name, &filters.name], vec![pads]);
        let y = Val::new(y, Dims(vec![x.0[0], Dim::Fixed(channels), x.0[1], x.0[2]]));
        let y = self.e.transpose(&y, &[0, 2, 1, 3]);
        self.set(n, 0, y);
        Ok(())
    }

    fn reduce_sum(&mut self, n: &Pair<'_>, op: [&ReduceSum; 2]) -> Result<()> {
        let outer = n.dim(op.map(|o| o.outer))?;
        let inner = n.dim(op.map(|o| o.inner))?;
        let middle = n.dim(op.map(|o| o.n))?;
        let x = self.input_as(n, 0, &[outer, middle, inner])?;
        let axis = self.e.ints(&[1]);
        let y = self.e.node("ReduceSum", &[&x.name, &axis], vec![AttributeProto::int("keepdims", 0)]);
        self.set(n, 0, Val::new(y, Dims(vec![outer, inner])));
        Ok(())
    }

    /// The columns of a gather's table: (position among the single-valued columns, columns).
    fn columns(&self, n: &Pair<'_>) -> Result<(usize, Vec<(String, usize)>)> {
        let mut before = 0;
        let table = n.nodes[0].inputs[0].index();
        let graph = &self.models[0].graph;
        for p in &self.models[0].params {
            let Kind::Embedding(columns) = &p.kind else { continue };
            if p.tensor.index() == table {
                return Ok((before, columns.clone()));
            }
            let reader = graph.nodes().iter().find(|n| n.inputs.first() == Some(&p.tensor));
            let pooled = reader.is_some_and(|r| {
                let op: &dyn Any = r.op.as_ref();
                op.is::<PooledGather>()
            });
            before += if pooled { 0 } else { columns.len() };
        }
        n.fail("a lookup in something else than an embedding table")
    }

    /// A lookup a column, each in a table of its own: an id beyond the column's last is an error of the
    /// runtime, not another column's row.
    fn gather(&mut self, n: &Pair<'_>) -> Result<()> {
        let (first, columns) = self.columns(n)?;
        if n.nodes[0].inputs[1].shape().last() != columns.len() {
            return n.fail("columns that share a table");
        }
        if self.ids.is_empty() {
            self.split_ids()?;
        }
        let mut parts = vec![];
        for (k, (name, _)) in columns.iter().enumerate() {
            let weight = format!("embeddings.{name}");
            let ids = self.ids[first + k].clone();
            parts.push(self.e.node("Gather", &[&weight, &ids], vec![AttributeProto::int("axis", 0)]));
            self.weights.push(weight);
        }
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let y = match parts[..] {
            [only] => only.to_owned(),
            _ => self.e.node("Concat", &parts, vec![AttributeProto::int("axis", 1)]),
        };
        self.set_whole(n, 0, y)
    }

    fn split_ids(&mut self) -> Result<()> {
        let graph = &self.models[0].graph;
        let total: usize = graph
            .nodes()
            .iter()
            .filter(|node| {
                let op: &dyn Any = node.op.as_ref();
                op.is::<Gather>()
            })
            .map(|node| node.inputs[1].shape().last())
            .sum();
        self.inputs.push(Input::Ids(total));
        self.ids = match total {
            1 => vec!["ids".into()],
            _ => {
                let sizes = self.e.ints(&vec![1; total]);
                self.e.nodes("Split", &["ids", &sizes], total, vec![AttributeProto::int("axis", 1)])
            }
        };
        Ok(())
    }

    /// Bags: differences of running sums, which are kept in 64 bits, so that nothing is lost by them.
    fn pooled_gather(&mut self, n: &Pair<'_>, op: &PooledGather) -> Result<()> {
        if op.weighted {
            return n.fail("bags with weights");
        }
        let (_, columns) = self.columns(n)?;
        let [(name, _)] = &columns[..] else { return n.fail("bags of several columns") };
        let d = n.nodes[0].inputs[0].shape().last();
        let table = format!("embeddings.{name}");
        self.weights.push(table.clone());
        let bags = n.nodes[0].outputs[0].shape().dim(0) / self.models[0].batch;
        self.inputs.push(Input::Bag { name: name.clone(), bags });
        let (ids, offsets) = (format!("{name}.ids"), format!("{name}.offsets"));
        let rows = self.e.node("Gather", &[&table, &ids], vec![AttributeProto::int("axis", 0)]);
        let rows = self.e.node("Cast", &[&rows], vec![AttributeProto::int("to", DOUBLE.into())]);
        let zero = self.e.zeros64(&[1, d]);
        let rows = self.e.node("Concat", &[&zero, &rows], vec![AttributeProto::int("axis", 0)]);
        let axis = self.e.int(0);
        let sums = self.e.call("CumSum", &[&rows, &axis]);
        let [start, one, last, end] = [0, 1, -1, i64::MAX].map(|v| self.e.ints(&[v]));
        let low = self.e.call("Slice", &[&offsets, &start, &last, &start]);
        let high = self.e.call("Slice", &[&offsets, &one, &end, &start]);
        let first = || vec![AttributeProto::int("axis", 0)];
        let (a, b) =
            (self.e.node("Gather", &[&sums, &high], first()), self.e.node("Gather", &[&sums, &low], first()));
        let mut y = self.e.call("Sub", &[&a, &b]);
        if op.pool == Pool::Mean {
            let count = self.e.call("Sub", &[&high, &low]);
            let count = self.e.call("Max", &[&count, &one]);
            let count = self.e.node("Cast", &[&count], vec![AttributeProto::int("to", DOUBLE.into())]);
            let count = self.e.call("Unsqueeze", &[&count, &one]);
            y = self.e.call("Div", &[&y, &count]);
        }
        let y = self.e.node("Cast", &[&y], vec![AttributeProto::int("to", FLOAT.into())]);
        self.set_whole(n, 0, y)
    }
}
