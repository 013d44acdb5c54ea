//! Memory plan: which values share a buffer. Values are born at their node and die after their last
//! reader; a buffer is reused by the next value that fits best; an operation that allows it writes over its
//! dying input.

use super::{DType, Graph, Source, Tensor};
use crate::ops::Op;
use std::collections::HashMap;

/// Where every computed value lives.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Bytes of each buffer.
    pub buffers: Vec<usize>,
    /// Value index → buffer, for values that a kept node computes.
    pub buffer_of: HashMap<usize, usize>,
    /// Node → (input, output) positions that share a buffer.
    pub in_place: HashMap<usize, (usize, usize)>,
    /// Node → buffers of its scratch.
    pub scratch: HashMap<usize, Vec<usize>>,
    /// Node indices that are executed, in order.
    pub order: Vec<usize>,
    /// Sum over all computed values, in bytes: what there would be without sharing.
    pub unshared: usize,
}

impl Plan {
    /// Before which places of the order the host's work is waited for: where an output is read, at the end otherwise; the
    /// nodes in the order in which they began.
    pub fn waits(&self, g: &Graph) -> HashMap<usize, Vec<usize>> {
        let mut waits: HashMap<usize, Vec<usize>> = HashMap::new();
        for (at, &n) in self.order.iter().enumerate() {
            if g.nodes[n].op.host().is_none() {
                continue;
            }
            let reads = |m: &usize| {
                let outputs = &g.nodes[n].outputs;
                g.nodes[*m].inputs.iter().any(|t| outputs.iter().any(|o| o.index() == t.index()))
            };
            let reader = self.order[at + 1..].iter().position(reads).map(|i| at + 1 + i);
            waits.entry(reader.unwrap_or(self.order.len())).or_default().push(n);
        }
        waits
    }

    /// Bytes held by the plan's buffers.
    pub fn peak(&self) -> usize {
        self.buffers.iter().sum()
    }
}

/// Nodes that `keep` needs, plus those that update states and the host's; in order.
pub fn live_nodes(g: &Graph, keep: &[Tensor]) -> Vec<usize> {
    let mut need = vec![false; g.values.len()];
    for t in keep {
        need[t.index()] = true;
    }
    let mut order = vec![];
    for n in (0..g.nodes.len()).rev() {
        let node = &g.nodes[n];
        let acts = !node.op.mutates().is_empty() || node.op.host().is_some();
        if acts || node.outputs.iter().any(|o| need[o.index()]) {
            order.push(n);
            for i in &node.inputs {
                need[i.index()] = true;
            }
        }
    }
    order.reverse();
    order
}

/// The host's work begins as soon as its inputs exist: each right after its last input, in their own order.
fn host_first(g: &Graph, order: Vec<usize>) -> Vec<usize> {
    if order.iter().all(|&n| g.nodes[n].op.host().is_none()) {
        return order;
    }
    let place: HashMap<usize, usize> = order.iter().enumerate().map(|(at, &n)| (n, at)).collect();
    let mut key: Vec<(usize, usize, usize)> = vec![];
    let mut moved: HashMap<usize, usize> = HashMap::new();
    let mut last = 0;
    for (at, &n) in order.iter().enumerate() {
        if g.nodes[n].op.host().is_none() {
            key.push((at, 0, n));
            continue;
        }
        let made = g.nodes[n].inputs.iter().filter_map(|t| match g.value(*t).source {
            Source::Node(m, _) => Some(moved.get(&m).copied().unwrap_or(place[&m])),
            _ => None,
        });
        let after = made.max().unwrap_or(0).max(last);
        last = after;
        moved.insert(n, after);
        key.push((after, 1 + at, n));
    }
    key.sort_unstable();
    key.into_iter().map(|k| k.2).collect()
}

/// Plans the buffers of the nodes that `keep` needs. Values in `keep` are never overwritten.
/// `scratch` gives the elements (f32) of each node's scratch buffers, `alias` the pairs that an operation may
/// run in place.
pub fn plan(
    g: &Graph,
    keep: &[Tensor],
    scratch: &dyn Fn(usize) -> Vec<usize>,
    alias: &dyn Fn(&dyn Op) -> Vec<(usize, usize)>,
) -> Plan {
    let order = host_first(g, live_nodes(g, keep));
    let mut last = vec![0usize; g.values.len()];
    for (at, &n) in order.iter().enumerate() {
        for t in g.nodes[n].inputs.iter().chain(&g.nodes[n].outputs) {
            last[t.index()] = at;
        }
    }
    for t in keep {
        last[t.index()] = usize::MAX;
    }
    let mut p = Plan { order: order.clone(), ..Plan::default() };
    let mut free: Vec<usize> = vec![];
    for (at, &n) in order.iter().enumerate() {
        let node = &g.nodes[n];
        let mut shared = None;
        for (i, o) in alias(node.op.as_ref()) {
            let (x, y) = (node.inputs[i], node.outputs[o]);
            let once = node.inputs.iter().filter(|t| t.index() == x.index()).count() == 1;
            let same = x.shape().len() == y.shape().len() && g.value(x).dtype == g.value(y).dtype;
            if last[x.index()] == at && once && same && is_computed(g, x) {
                shared = Some((i, o));
                break;
            }
        }
        for (o, y) in node.outputs.iter().enumerate() {
            let bytes = g.value_type(*y).bytes();
            p.unshared += bytes;
            let b = match shared {
                Some((i, so)) if so == o => p.buffer_of[&node.inputs[i].index()],
                _ => take(&mut p.buffers, &mut free, bytes),
            };
            p.buffer_of.insert(y.index(), b);
        }
        if let Some(s) = shared {
            p.in_place.insert(n, s);
        }
        let extra: Vec<usize> = scratch(n)
            .into_iter()
            .map(|len| take(&mut p.buffers, &mut free, DType::F32.bytes(len)))
            .collect();
        free.extend(&extra);
        if !extra.is_empty() {
            p.scratch.insert(n, extra);
        }
        // what dies here is free for the next node (outputs that nobody reads, too)
        let mut dying: Vec<usize> = node.inputs.iter().chain(&node.outputs).map(|t| t.index()).collect();
        dying.sort_unstable();
        dying.dedup();
        for v in dying {
            let overwritten = shared.is_some_and(|(i, _)| node.inputs[i].index() == v);
            if last[v] == at
                && !overwritten
                && let Some(&b) = p.buffer_of.get(&v)
            {
                free.push(b);
            }
        }
    }
    p
}

fn is_computed(g: &Graph, t: Tensor) -> bool {
    matches!(g.value(t).source, Source::Node(..))
}

/// The smallest free buffer that fits; else the largest free one grows, if it is at least half; else a new one.
fn take(buffers: &mut Vec<usize>, free: &mut Vec<usize>, bytes: usize) -> usize {
    let fit =
        free.iter().enumerate().filter(|(_, b)| buffers[**b] >= bytes).min_by_key(|(_, b)| buffers[**b]);
    if let Some((pos, _)) = fit.filter(|(_, b)| buffers[**b] <= 4 * bytes.max(4096)) {
        return free.swap_remove(pos);
    }
    let grow =
        free.iter().enumerate().filter(|(_, b)| buffers[**b] < bytes).max_by_key(|(_, b)| buffers[**b]);
    if let Some((pos, &b)) = grow.filter(|(_, b)| buffers[**b] * 2 >= bytes) {
        free.swap_remove(pos);
        buffers[b] = bytes;
        return b;
    }
    buffers.push(bytes);
    buffers.len() - 1
}

/// Checks that no operation reads a value whose buffer another one has overwritten. For tests.
pub fn verify(g: &Graph, keep: &[Tensor], p: &Plan) -> Result<(), String> {
    let mut holds: HashMap<usize, usize> = HashMap::new();
    for &n in &p.order {
        let node = &g.nodes[n];
        for t in &node.inputs {
            if let Some(b) = p.buffer_of.get(&t.index())
                && holds.get(b) != Some(&t.index())
            {
                return Err(format!("{} reads {} from a reused buffer", node.op.name(), g.describe(*t)));
            }
        }
        for b in p.scratch.get(&n).into_iter().flatten() {
            holds.remove(b);
        }
        for t in &node.outputs {
            let b = p.buffer_of[&t.index()];
            if p.buffers[b] < g.value_type(*t).bytes() {
                return Err(format!("{} does not fit its buffer", g.describe(*t)));
            }
            let aliased = p.in_place.get(&n).is_some_and(|(_, o)| node.outputs[*o] == *t);
            let clash = node.inputs.iter().any(|i| p.buffer_of.get(&i.index()) == Some(&b));
            if clash && !aliased {
                return Err(format!("{} writes over its own input", node.op.name()));
            }
            if p.scratch.get(&n).is_some_and(|s| s.contains(&b)) {
                return Err(format!("{}: scratch is also an output", node.op.name()));
            }
            holds.insert(b, t.index());
        }
    }
    for t in keep {
        if let Some(b) = p.buffer_of.get(&t.index())
            && holds.get(b) != Some(&t.index())
        {
            return Err(format!("kept {} was overwritten", g.describe(*t)));
        }
    }
    Ok(())
}
