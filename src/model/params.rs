//! Parameters: names, shapes, how they start, which optimiser group they are in.

use crate::graph::{Graph, Shape, StateId, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

/// How a parameter starts.
#[derive(Clone, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zero,
    /// One number everywhere.
    Const(f64),
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    /// Given values.
    Values(Vec<f32>),
}

impl Init {
    /// Glorot's normal: keeps the variance of signals and gradients through a linear map.
    pub fn glorot(fan_in: usize, fan_out: usize) -> Self {
        Init::Normal((2.0 / (fan_in + fan_out) as f64).sqrt())
    }

    /// He's normal: the same before a ReLU.
    pub fn he(fan_in: usize) -> Self {
        Init::Normal((2.0 / fan_in as f64).sqrt())
    }
}

/// Which optimiser a parameter has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// AdamW with weight decay.
    Dense,
    /// AdamW without weight decay: biases, norms, gates α.
    NoDecay,
    /// A packed embedding table: row-wise optimiser on the rows of the batch. Its columns, in order, with
    /// their number of rows; a checkpoint stores each as a tensor of its own.
    Embedding(Vec<(String, usize)>),
}

/// One parameter.
#[derive(Clone, Debug)]
pub struct Param {
    /// Name, e.g. `layers.2.attention.wq`.
    pub name: String,
    /// Its handle in the graph.
    pub tensor: Tensor,
    /// Initial values.
    pub init: Init,
    /// Optimiser group.
    pub kind: Kind,
}

impl Param {
    /// What it is called in the state.
    pub fn id(&self) -> StateId {
        StateId::from(&self.name)
    }

    /// Whether it is an embedding table.
    pub fn is_table(&self) -> bool {
        matches!(self.kind, Kind::Embedding(_))
    }

    /// Shape.
    pub fn shape(&self) -> Shape {
        self.tensor.shape()
    }

    /// Initial values: a function of the seed and the parameter's name alone, so that adding a parameter
    /// changes no other.
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        self.initial_part(seed, 0..self.shape().len())
    }

    /// A part of them, without the memory for all.
    pub fn initial_part(&self, seed: u64, range: Range<usize>) -> Vec<f32> {
        match &self.init {
            Init::Zero => vec![0.0; range.len()],
            Init::Const(v) => vec![*v as f32; range.len()],
            Init::Values(v) => v[range].to_vec(),
            Init::Normal(std) => {
                let key = xxhash_rust::xxh3::xxh3_64_with_seed(self.name.as_bytes(), seed);
                let mut rng = ChaCha8Rng::seed_from_u64(key);
                // a pair of values takes two numbers of two words each
                rng.set_word_pos(range.start as u128 / 2 * 4);
                let skip = range.start % 2;
                let mut v = Vec::with_capacity(range.len() + 2);
                while v.len() < range.len() + skip {
                    // Box-Muller, both of the pair
                    let u: f64 = 1.0 - rng.random::<f64>();
                    let t: f64 = rng.random::<f64>() * std::f64::consts::TAU;
                    let r = (-2.0 * u.ln()).sqrt() * std;
                    v.push((r * t.cos()) as f32);
                    v.push((r * t.sin()) as f32);
                }
                v.drain(..skip);
                v.truncate(range.len());
                v
            }
        }
    }
}

/// What an attention module's weights are computed from.
#[derive(Clone, Debug)]
pub struct AttentionProbe {
    /// Its scope: `layers.0.attention`.
    pub scope: String,
    /// Queries `[B, m, d]`.
    pub q: Tensor,
    /// Keys `[B, m, d]`.
    pub k: Tensor,
    /// Heads, contiguous blocks of d / heads columns.
    pub heads: usize,
}

/// Dropout in a model under construction.
#[derive(Clone, Copy, Debug)]
pub struct Dropouts {
    /// The step's key, see [`crate::ops::dropout::key`].
    pub key: Tensor,
    /// Probability of leaving out a hidden unit of an MLP.
    pub mlp: f64,
    /// Dropouts made so far.
    pub sites: u32,
}

impl Dropouts {
    /// The next dropout, if it leaves out anything at all.
    pub fn apply(this: &mut Option<Self>, g: &mut Graph, x: Tensor, p: f64) -> Tensor {
        match this {
            Some(d) if p > 0.0 => {
                d.sites += 1;
                g.dropout(x, d.key, p, d.sites - 1)
            }
            _ => x,
        }
    }
}

/// The graph under construction, with its parameters and the current name prefix.
pub struct Builder<'a> {
    /// The graph.
    pub g: &'a mut Graph,
    /// Parameters made so far.
    pub params: Vec<Param>,
    /// Queries and keys of the attentions built so far, for diagnosis.
    pub attentions: Vec<AttentionProbe>,
    /// Dropout, where there is any.
    pub dropouts: Option<Dropouts>,
    prefix: Vec<String>,
}

impl<'a> Builder<'a> {
    /// Starts on a graph.
    pub fn new(g: &'a mut Graph) -> Self {
        Builder { g, params: vec![], attentions: vec![], dropouts: None, prefix: vec![] }
    }

    /// Runs `f` with `name` as the next part of parameter names and scopes.
    pub fn scoped<R>(&mut self, name: impl Into<String>, f: impl FnOnce(&mut Self) -> R) -> R {
        let name = name.into();
        self.prefix.push(name.clone());
        self.g.enter(&name);
        let r = f(self);
        self.g.leave();
        self.prefix.pop();
        r
    }

    /// The current prefix.
    pub fn scope(&self) -> String {
        self.prefix.join(".")
    }

    fn full(&self, name: &str) -> String {
        let mut s = self.prefix.join(".");
        if !s.is_empty() {
            s.push('.');
        }
        s + name
    }

    /// A parameter under the current prefix.
    pub fn param(&mut self, name: &str, shape: &[usize], init: Init, kind: Kind) -> Tensor {
        let name = self.full(name);
        let tensor = self.g.state(&name, shape);
        self.params.push(Param { name, tensor, init, kind });
        tensor
    }

    /// A weight matrix or other decayed parameter.
    pub fn weight(&mut self, name: &str, shape: &[usize], init: Init) -> Tensor {
        self.param(name, shape, init, Kind::Dense)
    }

    /// A bias, starting at zero, not decayed.
    pub fn bias(&mut self, name: &str, shape: &[usize]) -> Tensor {
        self.param(name, shape, Init::Zero, Kind::NoDecay)
    }

    /// `{name}.gamma` (ones) and `{name}.beta` (zeros) over the last axis, and the layer norm of `x`.
    pub fn layer_norm(&mut self, name: &str, x: Tensor) -> Tensor {
        let d = x.shape().last();
        let (gamma, beta) = self.scoped(name, |b| {
            (b.param("gamma", &[d], Init::Const(1.0), Kind::NoDecay), b.bias("beta", &[d]))
        });
        self.g.layer_norm(x, gamma, beta)
    }

    /// An MLP with biases: `w0, b0, w1, b1, …`, ReLU between layers, and after the last if `last_relu`; dropout after
    /// each ReLU.
    /// `x[rows, in]` → `[rows, widths.last()]`.
    pub fn mlp(&mut self, x: Tensor, widths: &[usize], last_relu: bool) -> Tensor {
        let mut x = x;
        for (i, &w) in widths.iter().enumerate() {
            let fan_in = x.shape().last();
            let relu = last_relu || i + 1 < widths.len();
            let init = if relu { Init::he(fan_in) } else { Init::glorot(fan_in, w) };
            let weight = self.weight(&format!("w{i}"), &[fan_in, w], init);
            let bias = self.bias(&format!("b{i}"), &[w]);
            x = self.g.matmul(x, weight);
            x = self.g.add(x, bias);
            if relu {
                x = self.g.relu(x);
                let p = self.dropouts.map_or(0.0, |d| d.mlp);
                x = Dropouts::apply(&mut self.dropouts, self.g, x, p);
            }
        }
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_first_values_is_a_part_of_all() {
        let mut g = Graph::new();
        let mut b = Builder::new(&mut g);
        b.param("t", &[7, 3], Init::Normal(0.5), Kind::Embedding(vec![("c".into(), 7)]));
        let p = b.params.remove(0);
        let all = p.initial(5);
        for range in [0..21, 0..4, 3..9, 4..5, 5..6, 20..21, 8..8] {
            assert_eq!(p.initial_part(5, range.clone()), all[range.clone()], "{range:?}");
        }
        assert!(all[0] != all[1] && p.initial(6) != all);
    }
}
