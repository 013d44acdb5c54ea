//! The training step as one graph: loss, backward, clipping by global norm, optimiser updates.
//!
//! With `train.accumulate` = k the graph has k copies of the model, one after the other, that share their parameters:
//! each one's activations are gone when the next begins. The gradients of dense parameters are added up; those of
//! embedding rows are summed over the occurrences of all k batches at once, so that a row that occurs in several of
//! them is still updated once.

use super::ranks::{Exchange, Ranks};
use crate::graph::{Form, Graph, Role, Slot, StateId, Tensor};
use crate::model::build::Model;
use crate::model::config::{ConfigError, EmbeddingOptimizer, TrainConfig};
use crate::model::params::{Kind, Param};
use crate::ops::embedding::SparseInputs;
use crate::ops::optim::Adam;

/// Elements of the `hyper` input.
pub const HYPER: usize = 8;

/// A training step.
#[derive(Clone, Debug)]
pub struct TrainingStep {
    /// The whole graph.
    pub graph: Graph,
    /// Parameters, whole, wherever their parts lie.
    pub params: Vec<Param>,
    /// Optimiser state and its elements, starting at zero; whole as the parameters.
    pub optimizer: Vec<(StateId, usize)>,
    /// Loss of the batch `[1]`.
    pub loss: Tensor,
    /// Squared global gradient norm before clipping `[1]`.
    pub norm2: Tensor,
    /// Where the tables lie on several ranks: how their rows come and go.
    pub exchange: Option<Exchange>,
}

/// The scope of the update.
pub(super) const UPDATE: &str = "update";

/// State that sums (loss, 1) over steps until the host resets it.
pub const RUNNING: &str = "running";

/// State that holds the number of the first bad step in two halves, as `hyper` has it; zero while all is well. See
/// [`crate::ops::guard`].
pub const GUARD: &str = "guard";

/// The gradient of a table, or of the part of one that this rank holds.
struct TableGrad {
    /// In the state, and its value.
    id: StateId,
    table: Tensor,
    grad: Tensor,
    index: SparseInputs,
    /// `[N + 1]`, how often the rows before each occur in the step.
    occurrences: Tensor,
}

impl TableGrad {
    /// Of a table that is here whole.
    fn here(p: &Param, grad: Tensor, index: SparseInputs) -> Self {
        TableGrad { id: p.id(), table: p.tensor, grad, index, occurrences: index.segments }
    }
}

/// What the update is made of.
struct Backward {
    graph: Graph,
    params: Vec<Param>,
    loss: Tensor,
    /// Of the dense parameters, in their order.
    dense: Vec<Tensor>,
    tables: Vec<TableGrad>,
    exchange: Option<Exchange>,
    /// Exists once the tables' gradients have arrived from other ranks.
    arrived: Option<Tensor>,
}

/// Appends backward and update to a model's graph.
///
/// # Panics
/// If the model was built with index inputs for another number of batches an update than the configuration's.
pub fn training_step(model: Model, cfg: &TrainConfig) -> TrainingStep {
    let backward = match cfg.accumulate {
        1 => one_batch(model),
        k => many_batches(&model, k, None, false),
    };
    update(backward, cfg, None)
}

/// [`training_step`] over several ranks: gradients of dense parameters are summed over them, tables lie where `ranks` says.
///
/// # Panics
/// If the model was built with index inputs.
pub fn training_step_over(model: &Model, cfg: &TrainConfig, ranks: &Ranks) -> TrainingStep {
    let counts = cfg.embedding_l2 > 0.0 && cfg.embedding_l2_frequency;
    update(many_batches(model, cfg.accumulate, Some(ranks), counts), cfg, Some(ranks))
}

fn update(backward: Backward, cfg: &TrainConfig, ranks: Option<&Ranks>) -> TrainingStep {
    let Backward { mut graph, params, loss, dense, mut tables, exchange, arrived } = backward;
    let g = &mut graph;
    g.enter_as(UPDATE, Role::Update);
    let hyper = g.input("hyper", [HYPER]);
    for (p, d) in params.iter().filter(|p| !p.is_table()).zip(&dense) {
        g.name(*d, format!("d {}", p.name));
    }
    for t in &mut tables {
        if cfg.embedding_l2 > 0.0 {
            let (lambda, by_frequency) = (cfg.embedding_l2, cfg.embedding_l2_frequency);
            t.grad = g.row_l2(lambda, by_frequency, t.table, t.grad, t.index.unique, t.occurrences, hyper);
        }
        assert_eq!(g.form(t.grad), Form::Rows(t.table.index()), "the gradient of {}", t.id);
        g.name(t.grad, format!("d {}", t.id));
    }
    let table_grads: Vec<Tensor> = tables.iter().map(|t| t.grad).collect();
    let norm2 = match ranks {
        None => {
            // in the order of the parameters
            let (mut d, mut t) = (dense.iter(), table_grads.iter());
            let of = |p: &Param| if p.is_table() { t.next() } else { d.next() };
            let all: Vec<Tensor> = params.iter().filter_map(of).copied().collect();
            g.sum_squares(&all)
        }
        Some(ranks) => {
            let mine: Vec<Tensor> = table_grads.into_iter().chain(arrived).collect();
            let mine = g.sum_squares(&mine);
            let all = ranks.sum_of_tables(g, mine);
            if dense.is_empty() {
                all
            } else {
                let dense = g.sum_squares(&dense);
                g.add(dense, all)
            }
        }
    };
    g.name(norm2, "the squared norm of the gradient");
    let guard = g.state(GUARD, [2]);
    let guarded = g.guard(guard, loss, norm2, hyper);
    let adam = Adam { beta1: cfg.beta1, beta2: cfg.beta2, eps: cfg.eps, ..Adam::default() };
    let slot = |g: &mut Graph, id: &StateId, slot, shape: &[usize]| g.state(id.beside(slot), shape);
    for (p, d) in params.iter().filter(|p| !p.is_table()).zip(dense) {
        let dims = p.shape().dims();
        let (m, v) = (slot(g, &p.id(), Slot::M, &dims), slot(g, &p.id(), Slot::V, &dims));
        let own = cfg.overrides.iter().find(|o| o.matches(&p.name));
        let usual = if p.kind == Kind::Dense { cfg.weight_decay } else { 0.0 };
        let decay = own.and_then(|o| o.decay).unwrap_or(usual);
        let lr_scale = own.map_or(1.0, |o| o.lr_scale);
        g.adamw(Adam { decay, lr_scale, ..adam }, p.tensor, m, v, d, hyper, guarded);
    }
    for t in &tables {
        let dims = t.table.shape().dims();
        let (d, unique) = (t.grad, t.index.unique);
        match cfg.embedding {
            EmbeddingOptimizer::Adagrad => {
                let acc = slot(g, &t.id, Slot::Acc, &dims[..1]);
                g.row_adagrad(cfg.embedding_eps, t.table, acc, d, unique, hyper, guarded);
            }
            EmbeddingOptimizer::Adam => {
                let (m, v) = (slot(g, &t.id, Slot::M, &dims), slot(g, &t.id, Slot::V, &dims));
                let options = Adam { eps: cfg.embedding_eps, ..adam };
                g.lazy_adam(options, t.table, m, v, d, unique, hyper, guarded);
            }
        }
    }
    let running = g.state(RUNNING, [1]);
    g.accumulate_into(running, loss);
    g.leave();
    let optimizer = params
        .iter()
        .flat_map(|p| {
            let rows = p.shape().dim(0);
            let width = p.shape().len() / rows;
            slots(p, cfg).iter().map(move |slot| (p.id().beside(*slot), slot.len(rows, width)))
        })
        .collect();
    TrainingStep { graph, params, optimizer, loss, norm2, exchange }
}

/// The optimiser's values beside a parameter.
pub fn slots(p: &Param, cfg: &TrainConfig) -> &'static [Slot] {
    match (&p.kind, cfg.embedding) {
        (Kind::Embedding(_), EmbeddingOptimizer::Adagrad) => &[Slot::Acc],
        _ => &[Slot::M, Slot::V],
    }
}

fn one_batch(model: Model) -> Backward {
    let Model { mut graph, params, loss, sparse, .. } = model;
    let wrt: Vec<Tensor> = params.iter().map(|p| p.tensor).collect();
    let grads = graph.gradients(loss, &wrt);
    let (mut dense, mut tables) = (vec![], vec![]);
    let mut indices = sparse.into_iter();
    for (p, grad) in params.iter().zip(grads) {
        if p.is_table() {
            let index = indices.next().expect("one index a table");
            tables.push(TableGrad::here(p, grad, index));
        } else {
            dense.push(grad);
        }
    }
    Backward { graph, params, loss, dense, tables, exchange: None, arrived: None }
}

fn many_batches(model: &Model, k: usize, ranks: Option<&Ranks>, counts: bool) -> Backward {
    assert!(model.sparse.is_empty(), "of several batches there is one index, over all of them");
    let mut g = Graph::new();
    let ids: Vec<StateId> = model.params.iter().filter(|p| p.is_table()).map(Param::id).collect();
    let exchange =
        ranks.map(|r| r.exchange(model.gathers.iter().map(|t| k * t.ids).collect(), counts, "step."));
    let working: Vec<(StateId, Tensor)> = match &exchange {
        None => vec![],
        Some(e) => {
            g.enter("embeddings");
            let tables = e.pull(&mut g, &ids);
            g.leave();
            ids.iter().cloned().zip(tables).collect()
        }
    };
    let mut params: Vec<Param> = model.params.clone();
    // the sums of gradients, and each table's gradients of what was gathered
    let mut dense: Vec<Option<Tensor>> = vec![None; params.iter().filter(|p| !p.is_table()).count()];
    let mut gathered: Vec<Vec<Tensor>> = vec![vec![]; model.gathers.len()];
    let (mut loss, mut weight): (Option<Tensor>, Option<Tensor>) = (None, None);
    let sum = |g: &mut Graph, a: Option<Tensor>, b: Tensor| match a {
        None => b,
        Some(a) => g.add(a, b),
    };
    for part in 0..k {
        let at = g.append_replacing(&model.graph, |id| id.of_part(part), &working);
        let here = |t: Tensor| at[t.index()].reshaped(t.shape());
        if part == 0 {
            // of a table that lies elsewhere the whole one's handle has only a shape
            for p in params.iter_mut().filter(|p| working.is_empty() || !p.is_table()) {
                p.tensor = here(p.tensor);
            }
        }
        let mut wrt: Vec<Tensor> = params.iter().filter(|p| !p.is_table()).map(|p| p.tensor).collect();
        let tables = wrt.len();
        wrt.extend(model.gathers.iter().map(|t| here(t.tensor)));
        let grads = g.gradients(here(model.loss_sum), &wrt);
        g.enter("accumulate");
        for (all, d) in dense.iter_mut().zip(&grads[..tables]) {
            *all = Some(sum(&mut g, *all, *d));
        }
        for (all, d) in gathered.iter_mut().zip(&grads[tables..]) {
            all.push(*d);
        }
        loss = Some(sum(&mut g, loss, here(model.loss_sum)));
        weight = Some(sum(&mut g, weight, here(model.weight_sum)));
        g.leave();
    }
    let (mut loss, mut weight) = (loss.expect("a part"), weight.expect("a part"));
    g.enter("accumulate");
    let mut dense: Vec<Tensor> = dense.into_iter().map(|d| d.expect("a part")).collect();
    let whole: Vec<Tensor> = params.iter().filter(|p| p.is_table()).map(|p| p.tensor).collect();
    // of each table in one go: what every part gathered
    let mut table_grads = vec![];
    for (i, (of, parts)) in model.gathers.iter().zip(&gathered).enumerate() {
        let width = of.tensor.shape().last();
        let flat: Vec<Tensor> = parts.iter().map(|t| t.reshaped([t.shape().len() / width, width])).collect();
        let dy = if flat.len() == 1 { flat[0] } else { g.concat(&flat, 0) };
        let s = SparseInputs::new(&mut g, &format!("table{i}"), k * of.ids, of.scaled);
        let table = working.get(i).map_or_else(|| whole[i], |w| w.1);
        let index: Vec<Tensor> = s.tensors().collect();
        table_grads.push((g.embedding_grad(table, dy, &index), s));
    }
    if let Some(ranks) = ranks {
        let both = ranks.sum_of_losses(&mut g, &[loss, weight]);
        (loss, weight) = (both[0], both[1]);
        dense = ranks.sum_of_gradients(&mut g, &dense);
    }
    let dense = dense.into_iter().map(|d| g.div(d, weight)).collect();
    let (mut tables, mut arrived) = (vec![], None);
    match &exchange {
        None => {
            for (p, (grad, index)) in params.iter().filter(|p| p.is_table()).zip(table_grads) {
                let grad = g.div(grad, weight);
                tables.push(TableGrad::here(p, grad, index));
            }
        }
        Some(e) => {
            let grads: Vec<Tensor> = table_grads.iter().map(|t| t.0).collect();
            let (own, token) = e.push(&mut g, &ids, &grads);
            arrived = Some(token);
            for (i, (piece, (table, grad, index))) in e.own().iter().zip(own).enumerate() {
                let grad = g.div(grad, weight);
                let id = piece.state_id(&ids[piece.table()]);
                // of all ranks; the index has one entry a rank
                let occurrences = e.occurrences(&mut g, i).unwrap_or(index.segments);
                tables.push(TableGrad { id, table, grad, index, occurrences });
            }
        }
    }
    let loss = g.div(loss, weight);
    g.leave();
    Backward { graph: g, params, loss, dense, tables, exchange, arrived }
}

/// An error for an override that fits no dense parameter.
pub fn check_overrides(params: &[Param], cfg: &TrainConfig) -> Result<(), ConfigError> {
    let mut dense = params.iter().filter(|p| !p.is_table());
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
