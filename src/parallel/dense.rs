//! Sums over ranks as operations of the graph: the loss, and the gradients of the dense layers in buckets.
//!
//! A bucket's sum begins when the backward pass has made its last gradient, and is waited for where the update reads it:
//! the device computes the next gradients meanwhile.

use crate::collective::{Communicator, Handle, Wire};
use crate::graph::{Array, Graph, Shape, Tensor};
use crate::ops::host::{HostWork, Pending};
use crate::sync::lock;
use std::sync::{Arc, Mutex};

/// Requests that every rank makes of all: added up with the loss of each step, so that all ranks know the same at the
/// same step.
#[derive(Debug, Default)]
pub struct Signals {
    mine: Mutex<[f32; SIGNALS]>,
    sum: Mutex<[f32; SIGNALS]>,
}

/// How many there are.
pub const SIGNALS: usize = 3;

impl Signals {
    /// Asks, from the next step on.
    pub fn ask(&self, wanted: [bool; SIGNALS]) {
        *lock(&self.mine) = wanted.map(|w| f32::from(u8::from(w)));
    }

    /// What some rank asked for in the last step.
    pub fn told(&self) -> [bool; SIGNALS] {
        lock(&self.sum).map(|n| n > 0.0)
    }
}

/// What rounding took away from a rank's gradients, bucket by bucket, to be added the next time (error feedback). Empty where
/// nothing is rounded.
#[derive(Debug, Default)]
pub struct Feedback(Mutex<Vec<(usize, Arc<Mutex<Vec<f32>>>)>>);

impl Feedback {
    /// That of one more bucket of `len` values.
    fn bucket(&self, len: usize) -> Arc<Mutex<Vec<f32>>> {
        let lost: Arc<Mutex<Vec<f32>>> = Arc::new(Mutex::new(vec![0.0; len]));
        lock(&self.0).push((len, lost.clone()));
        lost
    }

    /// Each bucket's. Only between steps.
    pub fn values(&self) -> Vec<Vec<f32>> {
        lock(&self.0).iter().map(|(_, lost)| lock(lost).clone()).collect()
    }

    /// Takes up [`Feedback::values`] of before. Where the buckets were others they cannot be used.
    pub fn restore(&self, values: Vec<Vec<f32>>) {
        let buckets = lock(&self.0);
        if buckets.iter().map(|b| b.0).eq(values.iter().map(Vec::len)) {
            buckets.iter().zip(values).for_each(|((_, lost), v)| *lock(lost) = v);
        }
    }
}

/// The sum over ranks of all its inputs, as one operation.
#[derive(Debug)]
struct AllReduce {
    comm: Communicator,
    wire: Wire,
    /// Whether to go on while it runs.
    overlap: bool,
    signals: Option<Arc<Signals>>,
    /// What rounding took away; empty if the wire does not round.
    lost: Arc<Mutex<Vec<f32>>>,
}

struct Reducing {
    handle: Handle<(Vec<f32>, Vec<f32>)>,
    lengths: Vec<usize>,
    signals: Option<Arc<Signals>>,
    lost: Arc<Mutex<Vec<f32>>>,
}

/// A result that is there.
struct Ready(Result<Vec<Array>, String>);

impl Pending for Ready {
    fn wait(self: Box<Self>) -> Result<Vec<Array>, String> {
        self.0
    }
}

impl HostWork for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        inputs.to_vec()
    }

    fn start(&self, inputs: Vec<Array>) -> Box<dyn Pending> {
        let inputs: Vec<Vec<f32>> = inputs.into_iter().map(Array::into_f32).collect();
        let lengths: Vec<usize> = inputs.iter().map(Vec::len).collect();
        let mut data = Vec::with_capacity(lengths.iter().sum::<usize>() + SIGNALS);
        inputs.iter().for_each(|v| data.extend_from_slice(v));
        if let Some(s) = &self.signals {
            data.extend_from_slice(&*lock(&s.mine));
        }
        let lost = std::mem::take(&mut *lock(&self.lost));
        let handle = self.comm.all_reduce_wire_start(data, self.wire, lost);
        let reducing = Reducing { handle, lengths, signals: self.signals.clone(), lost: self.lost.clone() };
        match self.overlap {
            true => Box::new(reducing),
            false => Box::new(Ready(Box::new(reducing).wait())),
        }
    }
}

impl Pending for Reducing {
    fn wait(self: Box<Self>) -> Result<Vec<Array>, String> {
        let (data, lost) = self.handle.wait().map_err(|e| e.to_string())?;
        *lock(&self.lost) = lost;
        let mut rest = &data[..];
        let outputs = self.lengths.iter().map(|n| {
            let (head, tail) = rest.split_at(*n);
            rest = tail;
            Array::F(head.to_vec())
        });
        let outputs = outputs.collect();
        if let Some(s) = &self.signals {
            lock(&s.sum).copy_from_slice(rest);
        }
        Ok(outputs)
    }
}

/// How dense gradients travel.
#[derive(Clone, Debug)]
pub struct DenseOptions {
    /// Bytes of gradients that are summed by one operation.
    pub bucket: usize,
    /// Whether the device goes on meanwhile.
    pub overlap: bool,
    /// What they look like on the way.
    pub wire: Wire,
}

impl Default for DenseOptions {
    fn default() -> Self {
        DenseOptions { bucket: 4 << 20, overlap: true, wire: Wire::F32 }
    }
}

/// Appends sums over ranks of a few small values, exact, with the signals.
pub fn all_reduce_small(
    g: &mut Graph,
    comm: &Communicator,
    values: &[Tensor],
    signals: Option<Arc<Signals>>,
) -> Vec<Tensor> {
    let work =
        AllReduce { comm: comm.clone(), wire: Wire::F32, overlap: true, signals, lost: Arc::default() };
    g.host(Arc::new(work), values)
}

/// Appends the sums over ranks of gradients, in buckets, in the order in which the backward pass makes them. What rounding
/// takes away of them is in `feedback` between steps.
pub fn all_reduce_gradients(
    g: &mut Graph,
    comm: &Communicator,
    grads: &[Tensor],
    options: &DenseOptions,
    feedback: &Feedback,
) -> Vec<Tensor> {
    let mut order: Vec<usize> = (0..grads.len()).collect();
    // values are numbered in the order of the nodes that make them
    order.sort_by_key(|&i| grads[i].index());
    let mut out = grads.to_vec();
    let mut at = 0;
    while at < order.len() {
        let mut bytes = 0;
        let first = at;
        let of = |at: usize| g.value_type(grads[order[at]]).bytes();
        while at < order.len() && (bytes == 0 || bytes + of(at) <= options.bucket) {
            bytes += of(at);
            at += 1;
        }
        let elements = order[first..at].iter().map(|&i| grads[i].shape().len()).sum();
        let bucket: Vec<Tensor> = order[first..at].iter().map(|&i| grads[i]).collect();
        let work = AllReduce {
            comm: comm.clone(),
            wire: options.wire,
            overlap: options.overlap,
            signals: None,
            lost: if options.wire.is_exact() { Arc::default() } else { feedback.bucket(elements) },
        };
        for (i, sum) in order[first..at].iter().zip(g.host(Arc::new(work), &bucket)) {
            out[*i] = sum;
        }
    }
    out
}
