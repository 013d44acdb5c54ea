//! The training step as one graph: loss, backward, clipping by global norm, optimiser updates.
//!
//! With `train.accumulate` = k the graph has k copies of the model, one after the other, that share their parameters:
//! each one's activations are gone when the next begins. The gradients of dense parameters are added up; those of
//! embedding rows are summed over the occurrences of all k batches at once, so that a row that occurs in several of
//! them is still updated once.

use super::infer::part_name;
use crate::graph::{Graph, Tensor};
use crate::model::build::Model;
use crate::model::config::{ConfigError, EmbeddingOptimizer, TrainConfig};
use crate::model::params::{Kind, Param};
use crate::ops::embedding::SparseInputs;
use crate::ops::embedding_grad::EmbeddingGrad;
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
///
/// # Panics
/// If the model was built with index inputs for another number of batches an update than the configuration's.
pub fn training_step(model: Model, cfg: &TrainConfig) -> TrainingStep {
    let (mut graph, params, loss, mut grads, sparse) = match cfg.accumulate {
        1 => one_batch(model),
        k => many_batches(&model, k),
    };
    let g = &mut graph;
    g.enter("update");
    let hyper = g.input("hyper", [HYPER]);
    let mut indices = sparse.iter();
    for (p, d) in params.iter().zip(&mut grads) {
        if let (Kind::Embedding(_), true) = (&p.kind, cfg.embedding_l2 > 0.0) {
            let s = indices.next().expect("one index a table");
            let lambda = cfg.embedding_l2;
            let by_frequency = cfg.embedding_l2_frequency;
            *d = g.row_l2(lambda, by_frequency, p.tensor, *d, s.unique, s.segments, hyper);
        }
        g.name(*d, format!("d {}", p.name));
    }
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
    let adam = Adam { beta1: cfg.beta1, beta2: cfg.beta2, eps: cfg.eps, ..Adam::default() };
    for (p, d) in params.iter().zip(grads) {
        let dims = p.shape().dims();
        match &p.kind {
            Kind::Dense | Kind::NoDecay => {
                let m = state(g, p, "m", p.shape().len(), &dims);
                let v = state(g, p, "v", p.shape().len(), &dims);
                let own = cfg.overrides.iter().find(|o| o.matches(&p.name));
                let usual = if p.kind == Kind::Dense { cfg.weight_decay } else { 0.0 };
                let decay = own.and_then(|o| o.decay).unwrap_or(usual);
                let lr_scale = own.map_or(1.0, |o| o.lr_scale);
                g.adamw(Adam { decay, lr_scale, ..adam }, p.tensor, m, v, d, hyper, guarded);
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

type Backward = (Graph, Vec<Param>, Tensor, Vec<Tensor>, Vec<SparseInputs>);

fn one_batch(model: Model) -> Backward {
    let Model { mut graph, params, loss, sparse, .. } = model;
    let wrt: Vec<Tensor> = params.iter().map(|p| p.tensor).collect();
    let grads = graph.gradients(loss, &wrt);
    (graph, params, loss, grads, sparse)
}

fn many_batches(model: &Model, k: usize) -> Backward {
    assert!(model.sparse.is_empty(), "of several batches there is one index, over all of them");
    let mut g = Graph::new();
    let mut params: Vec<Param> = vec![];
    // per parameter: the sum of gradients, or a table's gradients of what was gathered
    let mut dense: Vec<Option<Tensor>> = vec![None; model.params.len()];
    let mut gathered: Vec<Vec<Tensor>> = vec![vec![]; model.gathers.len()];
    let (mut loss, mut weight): (Option<Tensor>, Option<Tensor>) = (None, None);
    let sum = |g: &mut Graph, a: Option<Tensor>, b: Tensor| match a {
        None => b,
        Some(a) => g.add(a, b),
    };
    for part in 0..k {
        let at = g.append(&model.graph, |name| part_name(name, part));
        let here = |t: Tensor| at[t.index()].reshaped(t.shape());
        if part == 0 {
            params = model.params.iter().map(|p| Param { tensor: here(p.tensor), ..p.clone() }).collect();
        }
        let is_table = |p: &Param| matches!(p.kind, Kind::Embedding(_));
        let mut wrt: Vec<Tensor> = params.iter().filter(|p| !is_table(p)).map(|p| p.tensor).collect();
        let tables = wrt.len();
        wrt.extend(model.gathers.iter().map(|t| here(t.tensor)));
        let grads = g.gradients(here(model.loss_sum), &wrt);
        g.enter("accumulate");
        let places = (0..params.len()).filter(|&i| !is_table(&params[i]));
        for (i, d) in places.zip(&grads[..tables]) {
            dense[i] = Some(sum(&mut g, dense[i], *d));
        }
        for (all, d) in gathered.iter_mut().zip(&grads[tables..]) {
            all.push(*d);
        }
        loss = Some(sum(&mut g, loss, here(model.loss_sum)));
        weight = Some(sum(&mut g, weight, here(model.weight_sum)));
        g.leave();
    }
    let (loss, weight) = (loss.expect("a part"), weight.expect("a part"));
    g.enter("accumulate");
    let mut sparse = vec![];
    let mut tables = gathered.into_iter().enumerate();
    let grads = params
        .iter()
        .zip(dense)
        .map(|(p, d)| {
            let d = match d {
                Some(d) => d,
                None => {
                    let (i, parts) = tables.next().expect("one gather a table");
                    let width = p.shape().last();
                    let flat: Vec<Tensor> =
                        parts.iter().map(|t| t.reshaped([t.shape().len() / width, width])).collect();
                    let dy = g.concat(&flat, 0);
                    let of = &model.gathers[i];
                    let s = SparseInputs::new(&mut g, &format!("table{i}"), k * of.ids, of.scaled);
                    sparse.push(s);
                    let inputs = [dy, s.order, s.segments].into_iter().chain(s.scale);
                    g.push(EmbeddingGrad, &inputs.collect::<Vec<_>>())
                }
            };
            g.div(d, weight)
        })
        .collect();
    let loss = g.div(loss, weight);
    g.leave();
    (g, params, loss, grads, sparse)
}

/// An error for an override that fits no dense parameter.
pub fn check_overrides(params: &[Param], cfg: &TrainConfig) -> Result<(), ConfigError> {
    let mut dense = params.iter().filter(|p| !matches!(p.kind, Kind::Embedding(_)));
    for (i, o) in cfg.overrides.iter().enumerate() {
        if !dense.clone().any(|p| o.matches(&p.name)) {
            let key = format!("train.overrides[{i}].match");
            let name = dense.next().map_or("head.w0", |p| &p.name);
            return Err(ConfigError::at(
                &key,
                format!("{key} = {:?} fits no dense parameter; names are such as {name}", o.pattern),
            ));
        }
    }
    Ok(())
}

/// The `hyper` input of step t (from 1): learning rates, bias corrections, clip, t itself in two halves, and the examples
/// of the batch.
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
        (cfg.batch * cfg.accumulate) as f32,
    ]
}
