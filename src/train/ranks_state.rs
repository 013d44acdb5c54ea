//! The tables of several ranks' models on their way to and from files. A rank reads and writes what lies on it; only one
//! that does not see the run's folder gets it by way of rank 0.

use super::checkpoint::{CheckpointError, CheckpointMeta, TensorRef, TensorSpec};
use super::ranks::Ranks;
use super::save::{StateTensors, table_of};
use super::sharded::{Checkpoint, FEEDBACK, Part, Shard, part_spec};
use super::store::Store;
use crate::graph::exec::State;
use crate::graph::{Slot, StateId};
use crate::model::params::Param;
use crate::parallel::layout::Piece;
use std::borrow::Cow;

/// Values that are put together at a time.
const STRETCH: usize = 1 << 18;

/// A value of the state that is a part of a table, or of its optimiser's.
struct Held<'a> {
    /// In the state of the rank where it lies.
    id: StateId,
    piece: &'a Piece,
    /// The tensors of a checkpoint that it has parts of.
    tensors: &'a [TensorSpec],
    /// Whether a row is one number.
    by_row: bool,
}

impl Held<'_> {
    fn width(&self) -> usize {
        if self.by_row { 1 } else { self.piece.width() }
    }

    /// What parts of which of its tensors these are, in the order in which they lie one after the other.
    fn parts(&self) -> Vec<(&TensorSpec, Part)> {
        let mut out = vec![];
        for range in &self.piece.ranges {
            let range = range.start as usize..range.end as usize;
            let mut first = 0;
            for t in self.tensors {
                let end = first + t.shape[0];
                let (a, b) = (range.start.max(first), range.end.min(end));
                if a < b {
                    let columns = if self.by_row { 0..1 } else { self.piece.columns.clone() };
                    out.push((t, Part { rows: a - first..b - first, columns }));
                }
                first = end;
            }
        }
        out
    }

    fn refs<'a>(&'a self, specs: &'a [TensorSpec], mut values: &'a [f32]) -> Vec<TensorRef<'a>> {
        let mut next = |s: &'a TensorSpec| {
            let (data, rest) = values.split_at(s.shape.iter().product());
            values = rest;
            s.with(data)
        };
        specs.iter().map(&mut next).collect()
    }
}

/// Values of whole rows of a table, of those columns that a piece has.
fn cut(piece: &Piece, rows: &[f32], width: usize) -> Vec<f32> {
    rows.chunks_exact(width).flat_map(|row| row[piece.columns.clone()].iter().copied()).collect()
}

impl Ranks {
    /// What lies on a rank of values of the state.
    fn held<'a>(&'a self, rank: usize, params: &[Param], saved: &'a [StateTensors]) -> Vec<Held<'a>> {
        let pieces = &self.layout.pieces[self.layout.of(rank)];
        let mut out = vec![];
        for s in saved {
            let Some((table, p)) = table_of(params, &s.id) else { continue };
            for piece in pieces.iter().filter(|q| q.table == table) {
                let id = StateId { slot: s.id.slot, ..piece.state_id(&p.id()) };
                let by_row = id.slot.is_some_and(Slot::is_by_row);
                out.push(Held { id, piece, tensors: &s.parts, by_row });
            }
        }
        out
    }

    /// Puts this rank's parts of the tables' first values into the state, and zeros for their optimiser.
    pub(super) fn begin_tables(
        &self,
        state: &mut State,
        params: &[Param],
        seed: u64,
        slots: impl Fn(&Param) -> &'static [Slot],
    ) -> anyhow::Result<()> {
        for (table, p) in params.iter().filter(|p| p.is_table()).enumerate() {
            let width = p.shape().last();
            for piece in self.own().iter().filter(|q| q.table == table) {
                let id = piece.state_id(&p.id());
                let mut values = Vec::with_capacity(piece.rows() * piece.width());
                // a function of seed and name for the whole: the same numbers whatever lies where
                for range in &piece.ranges {
                    let step = (STRETCH / width).max(1);
                    for a in (range.start as usize..range.end as usize).step_by(step) {
                        let b = (a + step).min(range.end as usize);
                        values.extend(cut(piece, &p.initial_part(seed, a * width..b * width), width));
                    }
                }
                state.set(&id, &values)?;
                for slot in slots(p) {
                    state.set(id.beside(*slot), &vec![0.0; slot.len(piece.rows(), piece.width())])?;
                }
            }
        }
        Ok(())
    }

    /// Which ranks see the folder of the first one's store.
    pub(super) fn who_sees(&self, store: &mut dyn Store) -> anyhow::Result<Vec<bool>> {
        let mark = if self.rank() == 0 { store.mark()? } else { None };
        let told = self.tell((self.rank() == 0).then(|| mark.clone().unwrap_or_default()))?;
        let mine = self.rank() == 0 || !told.is_empty() && store.sees(&told);
        let all = self.one_of_each(u32::from(mine))?;
        if let Some(mark) = mark {
            store.unmark(&mark);
            let blind: Vec<String> =
                all.iter().enumerate().filter(|(_, x)| **x == 0).map(|(r, _)| r.to_string()).collect();
            if !blind.is_empty() {
                tracing::warn!(
                    "not seen by all ranks: the run's folder (by rank {}); rank 0 writes their parts of checkpoints, but they \
                     cannot go on from them: use a folder that all hosts share",
                    blind.join(", ")
                );
            }
        }
        Ok(all.into_iter().map(|x| x == 1).collect())
    }

    /// Writes what lies on each rank of a checkpoint; on rank 0 returns what the checkpoint must say of these files. All
    /// are complete then. `check` looks at every value before.
    pub(super) async fn keep_parts(
        &self,
        store: &mut dyn Store,
        sees: &[bool],
        (state, params, saved): (&State, &[Param], &[StateTensors]),
        meta: &CheckpointMeta,
        check: impl Fn(&StateId, &[f32]) -> anyhow::Result<()>,
    ) -> anyhow::Result<Vec<Shard>> {
        let (me, world) = (self.rank(), self.world());
        let held = self.held(me, params, saved);
        let ids: Vec<&StateId> = held.iter().map(|h| &h.id).collect();
        let values = state.view(&ids).await?;
        held.iter().zip(&values).try_for_each(|(h, v)| check(&h.id, v))?;
        let specs = |h: &Held<'_>| h.parts().into_iter().map(|(t, p)| part_spec(t, &p)).collect::<Vec<_>>();
        let mine: Vec<Vec<TensorSpec>> = held.iter().map(specs).collect();
        let mut sum = 0;
        let mut shards = vec![None; world];
        let lost = self.feedback.values();
        let own: Vec<TensorSpec> =
            lost.iter().enumerate().map(|(i, v)| self.feedback_spec(i, v.len())).collect();
        if sees[me] && !(held.is_empty() && lost.is_empty()) {
            let all = held.iter().zip(&mine).zip(&values);
            let refs = all.flat_map(|((h, s), v)| h.refs(s, v));
            let lost = own.iter().zip(&lost).map(|(s, v)| s.with(v));
            let refs: Vec<TensorRef<'_>> = refs.chain(lost).collect();
            let shard = store.shard(me, world, &refs, meta)?;
            sum = u64::from_str_radix(&shard.sum, 16)?;
            shards[me] = Some(shard);
        }
        for rank in (1..world).filter(|r| !sees[*r]) {
            let theirs = self.held(rank, params, saved);
            if theirs.is_empty() || ![0, rank].contains(&me) {
                continue;
            }
            if me == rank {
                values.iter().try_for_each(|v| self.comm.send(v, 0))?;
                continue;
            }
            let mut got = vec![];
            for h in &theirs {
                let mut v = vec![0f32; h.piece.rows() * h.width()];
                self.comm.receive(&mut v, rank)?;
                got.push((h, specs(h), v));
            }
            let refs: Vec<TensorRef<'_>> = got.iter().flat_map(|(h, s, v)| h.refs(s, v)).collect();
            shards[rank] = Some(store.shard(rank, world, &refs, meta)?);
        }
        // by which all files are known to be there
        let sums = self.one_of_each(sum)?;
        for (rank, sum) in sums.into_iter().enumerate().filter(|(_, sum)| *sum != 0) {
            let file = super::run::shard_name(meta.step, rank, world);
            shards[rank] = Some(Shard { file, sum: format!("{sum:016x}") });
        }
        Ok(shards.into_iter().flatten().collect())
    }

    /// Gives whole parameters to rank 0's store, a stretch of a table at a time.
    pub(super) async fn save_whole(
        &self,
        store: &mut dyn Store,
        (state, params, saved): (&State, &[Param], &[StateTensors]),
        meta: &CheckpointMeta,
    ) -> anyhow::Result<()> {
        let held = self.held(self.rank(), params, saved);
        let ids: Vec<&StateId> = held.iter().map(|h| &h.id).collect();
        let tables = state.view(&ids).await?;
        let tables: Vec<(&Held<'_>, &[f32])> = held.iter().zip(tables.iter().map(|v| &v[..])).collect();
        let whole = saved.iter().filter(|s| table_of(params, &s.id).is_none());
        let ids: Vec<&StateId> = whole.map(|s| &s.id).collect();
        let dense = state.view(&ids).await?;
        // in the order of the file
        let mut order: Vec<(&StateTensors, usize)> =
            saved.iter().flat_map(|s| (0..s.parts.len()).map(move |i| (s, i))).collect();
        order.sort_by(|a, b| a.0.parts[a.1].name.cmp(&b.0.parts[b.1].name));
        let mut give = |push: &mut dyn FnMut(&[f32]) -> anyhow::Result<()>| -> anyhow::Result<()> {
            for (s, i) in &order {
                match table_of(params, &s.id) {
                    Some((table, p)) => {
                        let first: usize = s.parts[..*i].iter().map(|t| t.shape[0]).sum();
                        let rows = first..first + s.parts[*i].shape[0];
                        self.assemble(table, p.shape().last(), rows, &tables, push)?;
                    }
                    None if self.rank() == 0 => {
                        let at = ids.iter().position(|id| **id == s.id).expect("viewed above");
                        push(&dense[at])?;
                    }
                    None => {}
                }
            }
            Ok(())
        };
        if self.rank() > 0 {
            return give(&mut |_| Ok(()));
        }
        let specs: Vec<TensorSpec> = saved.iter().flat_map(|s| s.parts.clone()).collect();
        store.parts(&specs, meta, &mut give)
    }

    /// Rows of a packed table on rank 0, which hands them on in order.
    fn assemble(
        &self,
        table: usize,
        width: usize,
        rows: std::ops::Range<usize>,
        mine: &[(&Held<'_>, &[f32])],
        push: &mut dyn FnMut(&[f32]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (me, step) = (self.rank(), (STRETCH / width.max(1)).max(1));
        for a in rows.clone().step_by(step) {
            let b = (a + step).min(rows.end);
            let mut out = vec![0f32; if me == 0 { (b - a) * width } else { 0 }];
            for piece in self.layout.pieces.iter().filter(|q| q.table == table) {
                let mut local = 0;
                for range in &piece.ranges {
                    let range = range.start as usize..range.end as usize;
                    let (from, to) = (range.start.max(a), range.end.min(b));
                    let at = (local + from.saturating_sub(range.start)) * piece.width();
                    local += range.len();
                    if from >= to {
                        continue;
                    }
                    let n = (to - from) * piece.width();
                    let own = || {
                        let held = mine.iter().find(|(h, _)| std::ptr::eq(h.piece, piece));
                        &held.expect("a piece of this rank's").1[at..at + n]
                    };
                    let values: Cow<'_, [f32]> = match (me, piece.rank) {
                        (0, 0) => own().into(),
                        (0, rank) => {
                            let mut v = vec![0f32; n];
                            self.comm.receive(&mut v, rank)?;
                            v.into()
                        }
                        (me, rank) if me == rank => {
                            self.comm.send(own(), 0)?;
                            continue;
                        }
                        _ => continue,
                    };
                    let places = out[(from - a) * width..].chunks_exact_mut(width);
                    for (row, values) in places.zip(values.chunks_exact(piece.width())) {
                        row[piece.columns.clone()].copy_from_slice(values);
                    }
                }
            }
            if me == 0 {
                push(&out)?;
            }
        }
        Ok(())
    }

    /// Brings the state to that of a checkpoint, which rank 0 has open, and every other rank that sees it. Each of these
    /// reads a share of the files against their checksums, then its own parts of the tables. `Some`: it is damaged; nothing
    /// was changed.
    pub(super) fn take_up(
        &self,
        mut from: Option<Checkpoint>,
        (state, params, saved): (&mut State, &[Param], &[StateTensors]),
    ) -> anyhow::Result<Option<CheckpointError>> {
        let (me, world) = (self.rank(), self.world());
        let sees = self.one_of_each(u32::from(from.is_some()))?;
        let readers: Vec<usize> = (0..world).filter(|r| sees[*r] == 1).collect();
        let share = readers.iter().position(|r| *r == me);
        let checked = match (&mut from, share) {
            (Some(c), Some(share)) => c.verify(|file| file % readers.len() == share),
            _ => Ok(()),
        };
        if let Some(e) = self.first_error(checked.err())? {
            return Ok(Some(e));
        }
        let read = |from: &mut Checkpoint, h: &Held<'_>| {
            let parts = h.parts();
            let values = parts.iter().map(|(t, p)| from.read(&t.name, p));
            values.collect::<Result<Vec<_>, _>>().map(|v| v.concat())
        };
        for s in saved.iter().filter(|s| table_of(params, &s.id).is_none()) {
            let mut v = match (me, &mut from) {
                (0, Some(c)) => c.whole(&s.parts[0].name)?,
                _ => vec![0.0; s.parts[0].shape.iter().product()],
            };
            self.comm.broadcast(&mut v, 0)?;
            state.set(&s.id, &v)?;
        }
        for h in self.held(me, params, saved) {
            if let Some(c) = &mut from {
                let values = read(c, &h)?;
                state.set(&h.id, &values)?;
            }
        }
        if let Some(c) = &mut from {
            let name = |i| self.feedback_name(i);
            let there: Vec<String> = (0..).map(name).take_while(|n| c.has(n)).collect();
            self.feedback.restore(there.iter().map(|n| c.whole(n)).collect::<Result<_, _>>()?);
        }
        for rank in (1..world).filter(|r| sees[*r] == 0 && [0, *r].contains(&me)) {
            for h in self.held(rank, params, saved) {
                match &mut from {
                    Some(c) => self.comm.send(&read(c, &h)?, rank)?,
                    None => {
                        let mut v = vec![0f32; h.piece.rows() * h.width()];
                        self.comm.receive(&mut v, 0)?;
                        state.set(&h.id, &v)?;
                    }
                }
            }
        }
        Ok(None)
    }

    /// What rounding took away of a bucket is of use to the same rank of as many.
    fn feedback_name(&self, bucket: usize) -> String {
        format!("{FEEDBACK}{bucket}.rank{}of{}", self.rank(), self.world())
    }

    fn feedback_spec(&self, bucket: usize, len: usize) -> TensorSpec {
        let whole = TensorSpec::f32(self.feedback_name(bucket), [len]);
        part_spec(&whole, &Part { rows: 0..len, columns: 0..1 })
    }

    /// The first rank's error, if any has one, on all.
    fn first_error(&self, mine: Option<CheckpointError>) -> anyhow::Result<Option<CheckpointError>> {
        let mine = mine.map(|e| e.to_words()).unwrap_or_default();
        let (all, lengths) = self.some_of_each(&mine)?;
        let first = lengths.into_iter().find(|n| *n > 0);
        Ok(first.map(|n| CheckpointError::from_words(&all[..n])))
    }
}
