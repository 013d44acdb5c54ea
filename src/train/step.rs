//! The training step as one graph: loss, backward, clipping by global norm, optimiser updates.

use crate::graph::{Graph, Tensor};
use crate::model::build::Model;
use crate::model::config::{EmbeddingOptimizer, TrainConfig};
use crate::model::params::{Kind, Param};
use crate::ops::optim::Adam;

/// Elements of the `hyper` input.
pub const HYPER: usize = 8;

/// A training step.
#[derive(Clone, Debug)]
pub struct TrainingStep {
    /// The whole graph.
    pub graph: Graph,
    /// Parameters.
    pub params: Vec<Param>,
    /// Optimiser state: (name, elements), starting at zero.
    pub optimizer: Vec<(String, usize)>,
    /// Loss of the batch `[1]`.
    pub loss: Tensor,
    /// Squared global gradient norm before clipping `[1]`.
    pub norm2: Tensor,
}

/// State that sums (loss, 1) over steps until the host resets it.
pub const RUNNING: &str = "running";

/// State that holds the number of the first bad step in two halves, as `hyper` has it; zero while all is well. See
/// [`crate::ops::guard`].
pub const GUARD: &str = "guard";

/// Appends backward and update to a model's graph.
pub fn training_step(model: Model, cfg: &TrainConfig) -> TrainingStep {
    let Model { mut graph, params, loss, sparse, .. } = model;
    let g = &mut graph;
    let wrt: Vec<Tensor> = params.iter().map(|p| p.tensor).collect();
    let grads = g.gradients(loss, &wrt);
    g.enter("update");
    for (p, d) in params.iter().zip(&grads) {
        g.name(*d, format!("d {}", p.name));
    }
    let hyper = g.input("hyper", [HYPER]);
    let norm2 = g.sum_squares(&grads);
    g.name(norm2, "the squared norm of the gradient");
    let guard = g.state(GUARD, [2]);
    let guarded = g.guard(guard, loss, norm2, hyper);
    let mut optimizer = vec![];
    let mut state = |g: &mut Graph, p: &Param, what: &str, len: usize, shape: &[usize]| {
        let name = format!("{}#{what}", p.name);
        optimizer.push((name.clone(), len));
        g.state(&name, shape)
    };
    let mut indices = sparse.iter();
    let adam = Adam { beta1: cfg.beta1, beta2: cfg.beta2, eps: cfg.eps, decay: 0.0 };
    for (p, d) in params.iter().zip(grads) {
        let dims = p.shape().dims();
        match &p.kind {
            Kind::Dense | Kind::NoDecay => {
                let m = state(g, p, "m", p.shape().len(), &dims);
                let v = state(g, p, "v", p.shape().len(), &dims);
                let decay = if p.kind == Kind::Dense { cfg.weight_decay } else { 0.0 };
                g.adamw(Adam { decay, ..adam }, p.tensor, m, v, d, hyper, guarded);
            }
            Kind::Embedding(_) => {
                let unique = indices.next().expect("one index a table").unique;
                match cfg.embedding {
                    EmbeddingOptimizer::Adagrad => {
                        let acc = state(g, p, "acc", dims[0], &dims[..1]);
                        g.row_adagrad(cfg.embedding_eps, p.tensor, acc, d, unique, hyper, guarded);
                    }
                    EmbeddingOptimizer::Adam => {
                        let m = state(g, p, "m", p.shape().len(), &dims);
                        let v = state(g, p, "v", p.shape().len(), &dims);
                        let options = Adam { eps: cfg.embedding_eps, ..adam };
                        g.lazy_adam(options, p.tensor, m, v, d, unique, hyper, guarded);
                    }
                }
            }
        }
    }
    let running = g.state(RUNNING, [1]);
    g.accumulate_into(running, loss);
    g.leave();
    TrainingStep { graph, params, optimizer, loss, norm2 }
}

/// The `hyper` input of step t (from 1): learning rates, bias corrections, clip, and t itself in two halves.
pub fn hyper(cfg: &TrainConfig, t: u64, factor: f64) -> [f32; HYPER] {
    let correction = |beta: f64| (1.0 - beta.powf(t as f64)) as f32;
    [
        (cfg.lr * factor) as f32,
        correction(cfg.beta1),
        correction(cfg.beta2),
        cfg.clip as f32,
        (cfg.embedding_lr * factor) as f32,
        (t & 0xFFFF) as f32,
        (t >> 16) as f32,
        0.0,
    ]
}
