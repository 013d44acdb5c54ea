//! Embedding tables that lie on several ranks: rows come from where they are, gradients go back.
//!
//! Before a step, while that before it is computed, the host sends the distinct ids of its batch to the ranks that hold their
//! rows ([`Exchange::ask`]).
//! In the graph each rank gathers what it was asked for and one all_to_all brings every rank the rows of its own batch, as a
//! small working table `[ids, width]`; the model looks up in it as it would in the whole one. Backward the summed gradient of
//! each of its rows goes back by another all_to_all to the rank that holds the row, which adds up those of all ranks in
//! their order and updates its part: the optimiser's state never moves.

use super::layout::{Layout, Piece};
use crate::collective::{Communicator, Handle, Result, Wire};
use crate::graph::{Array, Graph, Shape, StateId, Tensor};
use crate::ops::embedding::{Pool, SparseInputs};
use crate::ops::host::{HostWork, Pending};
use crate::ops::sparse_index::SparseIndex;
use crate::sync::lock;
use std::sync::{Arc, Mutex};

/// Who wants which rows in this step.
#[derive(Debug, Default)]
struct Route {
    /// For every piece: the places of the ids that lie there among this rank's distinct ids of its table.
    wanted: Vec<Vec<u32>>,
    /// For each own piece: how many rows each rank wants.
    asked: Vec<Vec<usize>>,
}

#[derive(Debug)]
struct Shared {
    layout: Arc<Layout>,
    comm: Communicator,
    /// For questions of the next step.
    ahead: Communicator,
    wire: Wire,
    /// Distinct ids of a batch in each table, at most.
    capacity: Vec<usize>,
    /// Whether it is told how often an id occurs.
    counts: bool,
    route: Mutex<Route>,
}

/// The exchange of one compiled graph. See the module's documentation.
#[derive(Clone, Debug)]
pub struct Exchange {
    shared: Arc<Shared>,
    /// Before the names of the graph's inputs.
    prefix: String,
}

/// What a rank was asked for, of one of its pieces: inputs of the graph.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Asked {
    /// `[N]` local rows, rank after rank; 0 after the last. N = world · capacity.
    pub ids: Vec<u32>,
    /// Their order.
    pub index: SparseIndex,
    /// `[N + 1]`, how often the distinct rows before each occur in all ranks' batches; empty where that is not told.
    pub occurrences: Vec<u32>,
}

impl Shared {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn own(&self) -> &[Piece] {
        &self.layout.pieces[self.layout.of(self.rank())]
    }

    /// Rows of what is gathered for others from an own piece.
    fn places(&self, p: &Piece) -> usize {
        self.layout.world * self.capacity[p.table]
    }
}

impl Exchange {
    /// For a graph whose batches have at most `capacity[t]` distinct ids in table t; `counts`: which is told how often each
    /// occurs. `comm` is for the operations of the graph, `ahead` for what is asked before. All ranks make the same, in the
    /// same order, and the graphs run alike.
    pub fn new(
        layout: Arc<Layout>,
        (comm, ahead): (Communicator, Communicator),
        wire: Wire,
        capacity: Vec<usize>,
        counts: bool,
        prefix: &str,
    ) -> Self {
        assert_eq!(capacity.len(), layout.tables.len());
        let shared = Shared { layout, comm, ahead, wire, capacity, counts, route: Mutex::default() };
        Exchange { shared: Arc::new(shared), prefix: prefix.into() }
    }

    fn input(&self, i: usize) -> String {
        format!("{}piece{i}", self.prefix)
    }

    /// Names of the graph inputs of own piece `i`: its ids, and the prefix of its index.
    pub fn inputs(&self, i: usize) -> (String, String) {
        (format!("{}.ids", self.input(i)), self.input(i))
    }

    /// How often rows of own piece `i` occur, [`Asked::occurrences`], as an input of the graph, where that is told.
    pub fn occurrences(&self, g: &mut Graph, i: usize) -> Option<Tensor> {
        let n = self.shared.places(&self.own()[i]) + 1;
        self.shared.counts.then(|| g.input_ids(&format!("{}.occurrences", self.input(i)), [n]))
    }

    /// What this rank holds.
    pub fn own(&self) -> &[Piece] {
        self.shared.own()
    }

    /// Appends the way of the rows: the working table of each table, `[capacity, width]`. `ids[t]` is the whole table's.
    pub fn pull(&self, g: &mut Graph, ids: &[StateId]) -> Vec<Tensor> {
        let s = &self.shared;
        let gathered: Vec<Tensor> = self
            .own()
            .iter()
            .enumerate()
            .map(|(i, p)| {
                let table = g.state(p.state_id(&ids[p.table]), [p.rows(), p.width()]);
                let ids = g.input_ids(&self.inputs(i).0, [s.places(p), 1]);
                g.gather(table, ids, None).reshaped([s.places(p), p.width()])
            })
            .collect();
        g.host(Arc::new(Pull(s.clone())), &gathered)
    }

    /// Appends the way back of the gradients `[capacity, width]` of the working tables: for each own piece its state, the
    /// summed gradient `[N, width]` and its index; and a value of zeros `[1]` that exists once they have arrived.
    pub fn push(
        &self,
        g: &mut Graph,
        ids: &[StateId],
        grads: &[Tensor],
    ) -> (Vec<(Tensor, Tensor, SparseInputs)>, Tensor) {
        let mut arrived = g.host(Arc::new(Push(self.shared.clone())), grads);
        let token = arrived.pop().expect("the last output");
        let own: Vec<Piece> = self.own().to_vec();
        let out = own
            .iter()
            .zip(arrived)
            .enumerate()
            .map(|(i, (p, rows))| {
                let index = SparseInputs::new(g, &self.inputs(i).1, self.shared.places(p), false);
                let table = state_of(g, &p.state_id(&ids[p.table]));
                let sum = g.embedding_grad(table, rows, &[index.order, index.segments]);
                (table, sum, index)
            })
            .collect();
        (out, token)
    }

    /// Tells the other ranks which rows this one wants: `unique[t]` are rising ids of table t, of which id i begins at
    /// `segments[t][i]` among the batch's, which tells how often it occurs. Goes on in the background, with `ahead` beside
    /// the operations of a step before; all ranks do the same.
    pub fn ask(&self, unique: &[&[u32]], segments: &[&[u32]], ahead: bool) -> Asking {
        let s = &self.shared;
        let (layout, world) = (&s.layout, s.layout.world);
        let mut wanted = vec![];
        let mut rows: Vec<Vec<u32>> = vec![];
        for p in &layout.pieces {
            let (mut places, mut local) = (vec![], vec![]);
            p.find(unique[p.table], |at, row| {
                places.push(at as u32);
                local.push(row);
            });
            if s.counts {
                let all = segments[p.table];
                local.extend(places.iter().map(|&at| all[at as usize + 1] - all[at as usize]));
            }
            wanted.push(places);
            rows.push(local);
        }
        let pieces_of: Vec<usize> = (0..world).map(|r| layout.of(r).len()).collect();
        let own = pieces_of[s.rank()];
        let lengths = rows.iter().map(|r| r.len() as u32).collect();
        let comm = if ahead { &s.ahead } else { &s.comm };
        let handle = comm.all_to_all_parts_start(rows.concat(), lengths, pieces_of, own);
        Asking { wanted, handle: Some(handle) }
    }

    /// Waits for what [`Exchange::ask`] began, from here on the step's: what this rank was asked for, for each of its
    /// pieces.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn prepare(&self, mut asking: Asking) -> Result<Vec<Asked>> {
        let s = &self.shared;
        let (ids, lengths) = asking.handle.take().expect("waited for once").wait()?;
        let (world, own) = (s.layout.world, self.own().len());
        // words an id
        let each = 1 + usize::from(s.counts);
        let mut out = vec![Asked::default(); own];
        let mut rest = &ids[..];
        for from in 0..world {
            for (a, n) in out.iter_mut().zip(&lengths[from * own..][..own]) {
                let (head, tail) = rest.split_at(*n as usize);
                let (ids, counts) = head.split_at(head.len() / each);
                a.ids.extend_from_slice(ids);
                a.occurrences.extend_from_slice(counts);
                rest = tail;
            }
        }
        for (a, p) in out.iter_mut().zip(self.own()) {
            let n = a.ids.len() as u32;
            a.ids.resize(s.places(p), 0);
            let bags: Vec<u32> = (0..=n).collect();
            a.index.set_bags(&a.ids, &bags, None, Pool::Sum);
            if s.counts {
                let (mut sum, of) = (0, std::mem::take(&mut a.occurrences));
                a.occurrences.push(0);
                for run in a.index.segments.windows(2) {
                    let asks = &a.index.order[run[0] as usize..run[1] as usize];
                    sum += asks.iter().map(|&k| of[k as usize]).sum::<u32>();
                    a.occurrences.push(sum);
                }
            }
        }
        let ids_of = |i: usize, r: usize| lengths[r * own + i] as usize / each;
        let asked = (0..own).map(|i| (0..world).map(|r| ids_of(i, r)).collect()).collect();
        *lock(&s.route) = Route { wanted: std::mem::take(&mut asking.wanted), asked };
        Ok(out)
    }
}

/// A question to the other ranks, under way. One that nobody needs any more is waited for: all ranks asked it.
#[derive(Debug)]
pub struct Asking {
    /// As in [`Route`].
    wanted: Vec<Vec<u32>>,
    handle: Option<Handle<(Vec<u32>, Vec<u32>)>>,
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            // what goes wrong, the next operation of the ranks finds as well
            let _ = handle.wait();
        }
    }
}

/// The tensor of a state that the graph has already.
fn state_of(g: &Graph, id: &StateId) -> Tensor {
    g.find_state(id).unwrap_or_else(|| panic!("no state named {id}"))
}

/// Rows to those who asked: inputs, what was gathered from each own piece; outputs, the working tables.
#[derive(Debug)]
struct Pull(Arc<Shared>);

struct Pulling {
    shared: Arc<Shared>,
    handle: Handle<Vec<f32>>,
}

impl HostWork for Pull {
    fn name(&self) -> &'static str {
        "pull_rows"
    }

    fn outputs(&self, _: &[Shape]) -> Vec<Shape> {
        let s = &self.0;
        s.layout.tables.iter().zip(&s.capacity).map(|(t, n)| Shape::new(&[*n, t.width])).collect()
    }

    fn start(&self, inputs: Vec<Array>) -> Box<dyn Pending> {
        let inputs: Vec<Vec<f32>> = inputs.into_iter().map(Array::into_f32).collect();
        let s = &self.0;
        let route = lock(&s.route);
        let world = s.layout.world;
        let own = s.own();
        let mut data = vec![];
        let mut sent = vec![0; world];
        // where in each piece the next rank's rows begin
        let mut at = vec![0; own.len()];
        for (to, sent) in sent.iter_mut().enumerate() {
            for (i, p) in own.iter().enumerate() {
                let n = route.asked[i][to] * p.width();
                data.extend_from_slice(&inputs[i][at[i]..][..n]);
                at[i] += n;
                *sent += n;
            }
        }
        let received: Vec<usize> = (0..world)
            .map(|r| s.layout.of(r).map(|i| route.wanted[i].len() * s.layout.pieces[i].width()).sum())
            .collect();
        let handle = s.comm.all_to_all_wire_start(data, sent, received, s.wire);
        Box::new(Pulling { shared: s.clone(), handle })
    }
}

impl Pending for Pulling {
    fn wait(self: Box<Self>) -> std::result::Result<Vec<Array>, String> {
        let data = self.handle.wait().map_err(|e| e.to_string())?;
        let s = &self.shared;
        let route = lock(&s.route);
        let shapes = s.layout.tables.iter().zip(&s.capacity);
        let mut out: Vec<Vec<f32>> = shapes.map(|(t, n)| vec![0.0; n * t.width]).collect();
        let mut rest = &data[..];
        for (p, places) in s.layout.pieces.iter().zip(&route.wanted) {
            let width = s.layout.tables[p.table].width;
            let table = &mut out[p.table];
            for at in places {
                let (row, tail) = rest.split_at(p.width());
                table[*at as usize * width..][p.columns.clone()].copy_from_slice(row);
                rest = tail;
            }
        }
        Ok(out.into_iter().map(Array::F).collect())
    }
}

/// Gradients to those who hold the rows: inputs, of each working table; outputs, of each own piece, and a token.
#[derive(Debug)]
struct Push(Arc<Shared>);

struct Pushing {
    shared: Arc<Shared>,
    handle: Handle<Vec<f32>>,
}

impl HostWork for Push {
    fn name(&self) -> &'static str {
        "push_gradients"
    }

    fn outputs(&self, _: &[Shape]) -> Vec<Shape> {
        let s = &self.0;
        let rows = s.own().iter().map(|p| Shape::new(&[s.places(p), p.width()]));
        rows.chain([Shape::new(&[1])]).collect()
    }

    fn start(&self, inputs: Vec<Array>) -> Box<dyn Pending> {
        let inputs: Vec<Vec<f32>> = inputs.into_iter().map(Array::into_f32).collect();
        let s = &self.0;
        let route = lock(&s.route);
        let world = s.layout.world;
        let mut data = vec![];
        for (p, places) in s.layout.pieces.iter().zip(&route.wanted) {
            let width = s.layout.tables[p.table].width;
            for at in places {
                data.extend_from_slice(&inputs[p.table][*at as usize * width..][p.columns.clone()]);
            }
        }
        let sent: Vec<usize> = (0..world)
            .map(|r| s.layout.of(r).map(|i| route.wanted[i].len() * s.layout.pieces[i].width()).sum())
            .collect();
        let received: Vec<usize> = (0..world)
            .map(|r| s.own().iter().zip(&route.asked).map(|(p, asked)| asked[r] * p.width()).sum())
            .collect();
        let handle = s.comm.all_to_all_wire_start(data, sent, received, s.wire);
        Box::new(Pushing { shared: s.clone(), handle })
    }
}

impl Pending for Pushing {
    fn wait(self: Box<Self>) -> std::result::Result<Vec<Array>, String> {
        let data = self.handle.wait().map_err(|e| e.to_string())?;
        let s = &self.shared;
        let route = lock(&s.route);
        let own = s.own();
        let mut out: Vec<Vec<f32>> =
            own.iter().map(|p| Vec::with_capacity(s.places(p) * p.width())).collect();
        let mut rest = &data[..];
        for from in 0..s.layout.world {
            for ((p, asked), out) in own.iter().zip(&route.asked).zip(&mut out) {
                let (rows, tail) = rest.split_at(asked[from] * p.width());
                out.extend_from_slice(rows);
                rest = tail;
            }
        }
        for (p, out) in own.iter().zip(&mut out) {
            out.resize(s.places(p) * p.width(), 0.0);
        }
        out.push(vec![0.0]);
        Ok(out.into_iter().map(Array::F).collect())
    }
}
