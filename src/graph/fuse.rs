//! Fusion: chains of maps become one map; a map after a matrix product becomes its epilogue; a sum with
//! the result of an operation that can accumulate becomes that operation's accumulating form.
//!
//! A rewrite of the list into a new one. What is no longer read is left behind and dropped by the plan.

use super::plan::live_nodes;
use super::{Graph, Source, Tensor};
use crate::ops::Op;
use crate::ops::access::Access;
use crate::ops::expr::{Bin, Expr};
use crate::ops::map::Map;
use crate::ops::matmul::{Epilogue, Matmul};
use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

/// A map may bind this many inputs: eight storage buffers a stage, one of them the output.
const MAX_MAP_INPUTS: usize = 7;
/// Inputs of an epilogue beside the two operands.
const MAX_EXTRAS: usize = 5;
/// Instructions of a fused expression; longer ones spill registers on every device.
const MAX_INSTRUCTIONS: usize = 64;

/// The fused graph, and where the tensors of `keep` are in it.
pub fn fuse(g: &Graph, keep: &[Tensor]) -> (Graph, Vec<Tensor>) {
    let order = live_nodes(g, keep);
    let mut uses = vec![0usize; g.values.len()];
    for &n in &order {
        let mut ids: Vec<usize> = g.nodes[n].inputs.iter().map(|t| t.index()).collect();
        ids.sort_unstable();
        ids.dedup();
        for i in ids {
            uses[i] += 1;
        }
    }
    for t in keep {
        uses[t.index()] += 2;
    }
    let mut f = Fuser { out: Graph::new(), at: HashMap::new(), single: HashMap::new() };
    for &n in &order {
        let node = &g.nodes[n];
        for t in &node.inputs {
            f.import(g, *t, uses[t.index()]);
        }
        let inputs: Vec<Tensor> = node.inputs.iter().map(|t| f.at[&t.index()].reshaped(t.shape())).collect();
        f.out.set_place(Some((node.scope.clone(), node.role)));
        let any: &dyn Any = node.op.as_ref();
        let outputs = match any.downcast_ref::<Map>() {
            Some(m) => f.map(m.clone(), inputs),
            None => f.out.push_arc(node.op.clone(), &inputs),
        };
        f.out.set_place(None);
        for (old, new) in node.outputs.iter().zip(outputs) {
            f.single.insert(new.index(), uses[old.index()] == 1);
            if let Some(name) = &g.values[old.index()].name {
                f.out.values[new.index()].name.get_or_insert_with(|| name.clone());
            }
            let at = &f.at;
            f.out.take_form(new, g.values[old.index()].form, |table| at.get(&table).copied());
            f.at.insert(old.index(), new);
        }
    }
    for t in keep {
        f.import(g, *t, 2);
    }
    let kept = keep.iter().map(|t| f.at[&t.index()].reshaped(t.shape())).collect();
    (f.out, kept)
}

struct Fuser {
    out: Graph,
    /// Old value → new tensor.
    at: HashMap<usize, Tensor>,
    /// New values with exactly one reader.
    single: HashMap<usize, bool>,
}

impl Fuser {
    /// Copies an input, state or constant into the new graph on first use.
    fn import(&mut self, g: &Graph, t: Tensor, uses: usize) {
        if self.at.contains_key(&t.index()) {
            return;
        }
        let v = g.value(t);
        assert!(!matches!(v.source, Source::Node(..)), "nodes come in order");
        let new = self.out.add_value(v.shape, v.dtype, v.source.clone(), v.name.clone());
        self.single.insert(new.index(), uses == 1);
        self.at.insert(t.index(), new);
    }

    /// The operation that made `t`, if this map is its only reader.
    fn producer(&self, t: Tensor) -> Option<(Arc<dyn Op>, Vec<Tensor>)> {
        if !self.single.get(&t.index()).copied().unwrap_or(false) {
            return None;
        }
        match self.out.value(t).source {
            Source::Node(n, 0) => {
                let node = &self.out.nodes[n];
                (node.outputs.len() == 1).then(|| (node.op.clone(), node.inputs.clone()))
            }
            _ => None,
        }
    }

    fn map(&mut self, mut m: Map, mut inputs: Vec<Tensor>) -> Vec<Tensor> {
        // a plain sum: let a producer accumulate
        if m.expr == Expr::binary(Bin::Add) && m.access.iter().all(Access::is_same) && inputs[0] != inputs[1]
        {
            for i in [1, 0] {
                if let Some((op, ins)) = self.producer(inputs[i])
                    && let Some(acc) = op.with_accumulate()
                    && ins.len() < MAX_MAP_INPUTS
                {
                    let mut ins = ins;
                    ins.push(inputs[1 - i]);
                    return self.out.push_arc(Arc::from(acc), &ins);
                }
            }
        }
        // inline maps that only this one reads
        let mut i = 0;
        while i < inputs.len() {
            if m.access[i].is_same()
                && let Some((op, ins)) = self.producer(inputs[i])
                && let Some(inner) = (op.as_ref() as &dyn Any).downcast_ref::<Map>()
                && inner.shape.len() == m.shape.len()
                && m.expr.ins.len() + inner.expr.ins.len() <= MAX_INSTRUCTIONS
            {
                let base = inputs.len();
                let expr = m.expr.inline(i, &inner.expr.renumber(|k| base + k));
                let all: Vec<(Tensor, Access)> = inputs
                    .iter()
                    .copied()
                    .zip(m.access.iter().cloned())
                    .chain(ins.iter().copied().zip(inner.access.iter().cloned()))
                    .collect();
                let (expr, all) = dedup(expr, all);
                if all.len() <= MAX_MAP_INPUTS {
                    inputs = all.iter().map(|x| x.0).collect();
                    m = Map { expr, access: all.into_iter().map(|x| x.1).collect(), shape: m.shape };
                    i = 0;
                    continue;
                }
            }
            i += 1;
        }
        // become the epilogue of a product that only this map reads, after the epilogue that it has already
        for i in 0..inputs.len() {
            if m.access[i].is_same()
                && let Some((op, ins)) = self.producer(inputs[i])
                && let Some(p) = (op.as_ref() as &dyn Any).downcast_ref::<Matmul>()
                && p.shape.len() == m.shape.len()
                && let Some((epilogue, extras)) = join_epilogue(p, &ins[2..], &m, &inputs, i)
            {
                let mut all = ins[..2].to_vec();
                all.extend(extras);
                let op = Matmul { epilogue: Some(epilogue), shape: m.shape, ..p.clone() };
                return self.out.push_multi(op, &all);
            }
        }
        self.out.push_multi(m, &inputs)
    }
}

/// The product's epilogue followed by the map that reads it as input `i`, and its extra inputs.
fn join_epilogue(
    p: &Matmul,
    extras: &[Tensor],
    m: &Map,
    inputs: &[Tensor],
    i: usize,
) -> Option<(Epilogue, Vec<Tensor>)> {
    // inputs of the joined expression: 0 the product, then the old extras, then the map's other inputs
    let mut all: Vec<(Tensor, Access)> = vec![];
    let inner = match &p.epilogue {
        None => Expr::input(0),
        Some(e) => {
            all.extend(extras.iter().copied().zip(e.access.iter().cloned()));
            e.expr.clone()
        }
    };
    let base = 1 + all.len();
    all.extend(inputs.iter().copied().zip(m.access.iter().cloned()));
    const PRODUCT: usize = u16::MAX as usize;
    let outer = m.expr.renumber(|k| if k == i { PRODUCT } else { base + k });
    let joined = outer.inline(PRODUCT, &inner);
    // drop what is not read (the product itself stays input 0), share what is equal
    let mut kept: Vec<(Tensor, Access)> = vec![];
    let mut to = vec![0usize; all.len() + 1];
    for k in joined.used_inputs().into_iter().filter(|&k| k > 0) {
        let (t, a) = &all[k - 1];
        to[k] =
            1 + kept.iter().position(|(t2, a2)| t2.index() == t.index() && a2 == a).unwrap_or_else(|| {
                kept.push((*t, a.clone()));
                kept.len() - 1
            });
    }
    let fits = kept.len() <= MAX_EXTRAS
        && joined.ins.len() <= MAX_INSTRUCTIONS
        && kept.iter().all(|(_, a)| p.fits(a));
    fits.then(|| {
        let expr = Expr::input(0).inline(0, &joined.renumber(|k| to[k]));
        let (tensors, access) = kept.into_iter().unzip();
        (Epilogue { expr, access }, tensors)
    })
}

/// Merges equal inputs and drops unused ones.
fn dedup(expr: Expr, all: Vec<(Tensor, Access)>) -> (Expr, Vec<(Tensor, Access)>) {
    let mut kept: Vec<(Tensor, Access)> = vec![];
    let used = expr.used_inputs();
    let mut to = vec![0usize; all.len()];
    for &k in &used {
        let (t, a) = &all[k];
        let found = kept.iter().position(|(t2, a2)| t2.index() == t.index() && a2 == a);
        to[k] = found.unwrap_or_else(|| {
            kept.push((*t, a.clone()));
            kept.len() - 1
        });
    }
    // renumbering can make equal instructions: rebuild to share them
    let renamed = expr.renumber(|k| to[k]);
    (Expr::input(0).inline(0, &renamed), kept)
}
