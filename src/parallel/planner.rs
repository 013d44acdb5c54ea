//! Where embedding tables go: longest processing time first, with a bound on memory.
//!
//! Tables are shards at first. A table that is larger than a rank's memory is cut; then shards go, the costliest first,
//! to the rank that is least busy with it and has room (LPT, Graham 1969: on equal machines at most 4/3 − 1/(3·ranks)
//! times the best schedule). What no rank has room for is cut where the room ends. Moves and swaps off the slowest rank
//! follow while they help. Then the table with the slowest rank's costliest shard is cut finer and all is placed anew,
//! while that helps: every shard has a fixed cost, so that it ends. Nothing is random: the same input gives the same
//! plan.
//!
//! Tables are cut by rows, into parts that a batch names equally many rows of; or by columns, where the rows of a
//! table are not alike (a vocabulary's first rows are its most frequent) and its optimiser keeps no state of whole rows
//! (row-wise Adagrad does: its accumulator is a mean over all columns).
//!
//! **Whether the tables fit** does not depend on how well this goes. They fit where pouring them does it: rank after
//! rank is filled with rows, and a table goes on where the next rank begins. Pouring wastes less than a row a rank, and
//! more ranks or memory never make it fail (next-fit is monotone, Murgolo 1988). Where LPT finds no room it is the plan.

use std::ops::Range;

use super::cost::{Cluster, CostModel, Load};
use super::placement::{MAX_WORLD, Placement, Shard, Table};
use crate::text::group;
use crate::text::human_bytes;

/// How tables may be cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cuts {
    /// By columns where their rows are not alike and the optimiser allows it, else by rows.
    #[default]
    Auto,
    /// By rows only.
    Rows,
    /// By columns first, also where the optimiser has state of whole rows: each part then has its own, and the result
    /// is another than that of the whole table.
    Columns,
}

/// Columns of a part, at least; parts begin at multiples of it.
const COLUMNS: u32 = 4;

/// Why there is no plan, in one line.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The tables are too large.
    #[error("{0}")]
    TooLarge(Box<TooLarge>),
    /// A table is none.
    #[error("{table}: a table of {rows} rows and {width} columns, expected at least one of each")]
    Empty {
        /// Its name.
        table: String,
        /// Its rows.
        rows: u64,
        /// Its columns.
        width: u32,
    },
}

/// By how much tables do not fit, and what would make them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// Ranks.
    pub ranks: usize,
    /// Bytes of each.
    pub memory: u64,
    /// Bytes of all tables with optimiser state.
    pub total: u64,
    /// Bytes that have no place.
    pub short: u64,
    /// Ranks of that memory that would do; `None` where 65536 do not, or a row is larger than that.
    pub ranks_needed: Option<usize>,
    /// Bytes a rank that would do.
    pub memory_needed: u64,
    /// The largest table, its rows, and to how many to cut it; `None` where that is not enough.
    pub fewer_rows: Option<(String, u64, u64)>,
}

impl std::fmt::Display for TooLarge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ranks = if self.ranks == 1 { "1 rank has" } else { "ranks have" };
        let many = if self.ranks == 1 { String::new() } else { format!("{} ", self.ranks) };
        write!(
            f,
            "the embedding tables do not fit: with optimiser state they have {}, {many}{ranks} {}{}: {} too much; what \
             would do: --memory {}",
            human_bytes(self.total),
            human_bytes(self.memory),
            if self.ranks == 1 { "" } else { " each" },
            human_bytes(self.short),
            round_up(self.memory_needed)
        )?;
        if let Some(n) = self.ranks_needed {
            write!(f, ", or --world {n}")?;
        }
        if let Some((name, rows, fewer)) = &self.fewer_rows {
            write!(f, ", or {} rows of {name} instead of {}", group(*fewer), group(*rows))?;
        }
        Ok(())
    }
}

/// Bytes as an argument that is no smaller: whole MiB, of little ones KiB or bytes.
fn round_up(bytes: u64) -> String {
    for (unit, size) in [("MiB", 1 << 20), ("KiB", 1 << 10)] {
        if bytes >= 16 * size {
            return format!("{}{unit}", bytes.div_ceil(size));
        }
    }
    bytes.to_string()
}

/// Places tables on the ranks of a cluster, for batches of `batch` examples on each rank.
pub fn plan(tables: &[Table], cluster: &Cluster, batch: u64, cuts: Cuts) -> Result<Placement, PlanError> {
    if let Some(t) = tables.iter().find(|t| t.rows == 0 || t.width == 0) {
        return Err(PlanError::Empty { table: t.name.clone(), rows: t.rows, width: t.width });
    }
    let memory = cluster.memory.unwrap_or(u64::MAX);
    let poured = pour(tables, memory, cluster.ranks);
    if poured.left > 0 {
        return Err(PlanError::TooLarge(Box::new(too_large(tables, memory, cluster.ranks, poured.left))));
    }
    let model = CostModel::new(tables, cluster, batch);
    let planner = Planner { model: &model, memory, cuts };
    let best = planner.search().unwrap_or_else(|| {
        let mut layout = Layout::new(&model, poured.shards);
        planner.refine(&mut layout);
        layout
    });
    Ok(Placement::new(cluster.ranks, best.into_shards(), tables)
        .unwrap_or_else(|e| unreachable!("the planner makes placements: {e}")))
}

/// What pouring came to.
struct Poured {
    shards: Vec<Shard>,
    /// Bytes without a place.
    left: u64,
    /// Ranks that were begun.
    ranks: usize,
}

/// Fills rank after rank with rows of the tables, those with the largest rows first.
fn pour(tables: &[Table], memory: u64, ranks: usize) -> Poured {
    let row = |t: &Table| t.bytes_of(1, t.width);
    let mut order: Vec<usize> = (0..tables.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(row(&tables[i])));
    let mut poured = Poured { shards: vec![], left: 0, ranks: 1 };
    let mut room = memory;
    for index in order {
        let t = &tables[index];
        let mut start = 0;
        while start < t.rows {
            if room < row(t) {
                if poured.ranks >= ranks || memory < row(t) {
                    // the rest stays outside: an order of rows is kept, so that more room never fits less
                    poured.left += t.bytes_of(t.rows - start, t.width);
                    room = 0;
                    poured.ranks = poured.ranks.max(ranks);
                    break;
                }
                poured.ranks += 1;
                room = memory;
            }
            let rows = (room / row(t)).min(t.rows - start);
            room -= t.bytes_of(rows, t.width);
            let rank = poured.ranks - 1;
            poured.shards.push(Shard { table: index, rows: start..start + rows, columns: 0..t.width, rank });
            start += rows;
        }
    }
    poured
}

/// The smallest number from `low` to `high` that does; `high` does.
fn smallest(mut low: u64, mut high: u64, does: impl Fn(u64) -> bool) -> u64 {
    while low < high {
        let middle = low + (high - low) / 2;
        if does(middle) { high = middle } else { low = middle + 1 }
    }
    low
}

fn too_large(tables: &[Table], memory: u64, ranks: usize, short: u64) -> TooLarge {
    let total: u64 = tables.iter().map(Table::bytes).sum();
    let widest = tables.iter().map(|t| t.bytes_of(1, t.width)).max().unwrap_or(0);
    let fits = |tables: &[Table], memory: u64| pour(tables, memory, ranks).left == 0;
    let memory_needed = smallest(total.div_ceil(ranks as u64), total, |m| fits(tables, m));
    let ranks_needed = (widest <= memory).then(|| pour(tables, memory, MAX_WORLD)).filter(|p| p.left == 0);
    let largest = (0..tables.len()).max_by_key(|&i| (tables[i].bytes(), std::cmp::Reverse(i)));
    let fewer_rows = largest.and_then(|i| {
        let with = |rows: u64| {
            let mut fewer = tables.to_vec();
            fewer[i].rows = rows;
            fewer
        };
        let t = &tables[i];
        // fewer than 3 rows would be no vocabulary
        fits(&with(3), memory).then(|| {
            let cut = smallest(0, t.rows - 3, |cut| fits(&with(t.rows - cut), memory));
            (t.name.clone(), t.rows, t.rows - cut)
        })
    });
    let ranks_needed = ranks_needed.map(|p| p.ranks);
    TooLarge { ranks, memory, total, short, ranks_needed, memory_needed, fewer_rows }
}

/// Shards, their loads, and where they are.
#[derive(Clone)]
struct Layout {
    shards: Vec<Shard>,
    loads: Vec<Load>,
    total: Load,
    /// What each rank holds.
    held: Vec<Load>,
    /// Shards of each rank.
    on: Vec<Vec<usize>>,
}

impl Layout {
    fn new(model: &CostModel<'_>, shards: Vec<Shard>) -> Layout {
        let loads: Vec<Load> = shards.iter().map(|s| model.load(s)).collect();
        let total = loads.iter().fold(Load::default(), |a, &b| a + b);
        let mut layout = Layout {
            held: vec![Load::default(); model.cluster.ranks],
            on: vec![vec![]; model.cluster.ranks],
            shards,
            loads,
            total,
        };
        for i in 0..layout.shards.len() {
            layout.on[layout.shards[i].rank].push(i);
        }
        (0..model.cluster.ranks).for_each(|r| layout.add_up(r));
        layout
    }

    /// A rank's sum, anew, so that moves leave no rounding behind.
    fn add_up(&mut self, rank: usize) {
        self.held[rank] = self.on[rank].iter().fold(Load::default(), |a, &i| a + self.loads[i]);
    }

    fn into_shards(self) -> Vec<Shard> {
        let mut shards = self.shards;
        for (rank, on) in self.on.iter().enumerate() {
            on.iter().for_each(|&i| shards[i].rank = rank);
        }
        shards
    }
}

/// How good a layout is: seconds of the slowest rank, then the sum of all squared.
type Score = (f64, f64);

/// Whether a score is smaller by more than rounding, and by more than a table in more pieces is worth.
fn better(a: Score, b: Score) -> bool {
    a.0 < b.0 * 0.995 || (a.0 <= b.0 && a.1 < b.1 * 0.995)
}

struct Planner<'a> {
    model: &'a CostModel<'a>,
    memory: u64,
    cuts: Cuts,
}

impl Planner<'_> {
    /// The best layout found, or none where LPT finds no room.
    fn search(&self) -> Option<Layout> {
        let tables = self.model.tables;
        let ranks = self.model.cluster.ranks as u64;
        // pieces no larger than a rank's memory
        let base: Vec<u64> =
            tables.iter().map(|t| t.bytes().div_ceil(self.memory).clamp(1, t.rows.min(4 * ranks))).collect();
        let mut best = (base.clone(), self.place(&base)?);
        // tables that cost more than a rank's share, in as many pieces as that
        let works: Vec<f64> = (0..tables.len())
            .map(|i| self.model.work(&self.model.load(&Shard::whole(i, &tables[i], 0)), 0))
            .collect();
        let share = works.iter().sum::<f64>() / ranks as f64;
        let counts = works.iter().zip(tables).zip(&base).map(|((w, t), &n)| {
            n.max(if share > 0.0 { (w / share).ceil() as u64 } else { 1 }).min(self.most_pieces(t).max(n))
        });
        self.try_counts(counts.collect(), &mut best);
        // one table after the other in more pieces
        for _ in 0..(2 * ranks + 16).min(64) {
            let layout = &best.1;
            let slowest = self.slowest(layout);
            let work = |&i: &usize| self.model.work(&layout.loads[i], slowest);
            let Some(&costliest) = layout.on[slowest].iter().max_by(|a, b| work(a).total_cmp(&work(b)))
            else {
                break;
            };
            let t = layout.shards[costliest].table;
            let (now, most) = (best.0[t], self.most_pieces(&tables[t]));
            let mut tries = vec![now + 1, 2 * now, ranks];
            tries.retain(|&n| n > now && n <= most);
            tries.dedup();
            let mut improved = false;
            for n in tries {
                let mut counts = best.0.clone();
                counts[t] = n;
                improved |= self.try_counts(counts, &mut best);
            }
            if !improved {
                break;
            }
        }
        Some(best.1)
    }

    /// Places tables in so many pieces each, and keeps that where it is better.
    fn try_counts(&self, counts: Vec<u64>, best: &mut (Vec<u64>, Layout)) -> bool {
        let Some(layout) = self.place(&counts) else { return false };
        let good = better(self.score(&layout), self.score(&best.1));
        if good {
            *best = (counts, layout);
        }
        good
    }

    /// Pieces of a table beyond which there is nothing to gain.
    fn most_pieces(&self, t: &Table) -> u64 {
        (2 * self.model.cluster.ranks as u64).min(t.rows)
    }

    fn score(&self, layout: &Layout) -> Score {
        let mut score = (0.0f64, 0.0);
        for (rank, held) in layout.held.iter().enumerate() {
            let s = self.model.seconds(rank, held, &layout.total);
            score = (score.0.max(s), score.1 + s * s);
        }
        score
    }

    fn slowest(&self, layout: &Layout) -> usize {
        let mut slowest = (0, 0.0);
        for (rank, held) in layout.held.iter().enumerate() {
            let s = self.model.seconds(rank, held, &layout.total);
            if s > slowest.1 {
                slowest = (rank, s);
            }
        }
        slowest.0
    }

    /// LPT and refinement of tables in so many pieces each; none where there is no room.
    fn place(&self, counts: &[u64]) -> Option<Layout> {
        let shards = (0..counts.len()).flat_map(|i| self.pieces(i, counts[i])).collect();
        let mut layout = self.lpt(shards)?;
        self.refine(&mut layout);
        Some(layout)
    }

    /// A table in so many pieces, at least.
    fn pieces(&self, index: usize, count: u64) -> Vec<Shard> {
        let t = &self.model.tables[index];
        let columns = match self.cuts {
            Cuts::Rows => false,
            Cuts::Auto => t.ranked && t.row_state == 0,
            Cuts::Columns => true,
        };
        let by_columns = if columns { count.min(u64::from(t.width / COLUMNS)).max(1) } else { 1 };
        let by_rows = count.div_ceil(by_columns).min(t.rows);
        let mut rows = self.model.traffic(index).equal_parts(by_rows);
        let column_parts = equal_columns(t.width, by_columns);
        let widest = column_parts.iter().map(|c| c.end - c.start).max().unwrap_or(t.width);
        if rows.iter().any(|r| t.bytes_of(r.end - r.start, widest) > self.memory) {
            // the rows that are hardly ever named are too many for one rank
            rows = (0..by_rows).map(|i| t.rows * i / by_rows..t.rows * (i + 1) / by_rows).collect();
        }
        let mut shards = vec![];
        for rows in rows {
            for columns in &column_parts {
                let (rows, columns) = (rows.clone(), columns.clone());
                shards.push(Shard { table: index, rows, columns, rank: 0 });
            }
        }
        shards
    }

    /// Longest processing time first. A shard that no rank has room for is cut by rows, so that what there is room for
    /// goes where it is; none where that ends with room for no row.
    fn lpt(&self, shards: Vec<Shard>) -> Option<Layout> {
        let ranks = self.model.cluster.ranks;
        let mut order: Vec<(f64, Load, Shard)> = shards
            .into_iter()
            .map(|s| {
                let load = self.model.load(&s);
                (self.model.work(&load, 0), load, s)
            })
            .collect();
        order.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut busy = vec![(0.0, 0u64); ranks];
        let mut placed = Vec::with_capacity(order.len());
        for (_, mut load, mut shard) in order {
            loop {
                let with = |r: usize| busy[r].0 + self.model.work(&load, r);
                let least_busy = |room: u64| {
                    let has_room = |r: &usize| self.memory - busy[*r].1 >= room;
                    (0..ranks).filter(has_room).min_by(|&a, &b| with(a).total_cmp(&with(b)))
                };
                if let Some(rank) = least_busy(load.bytes) {
                    busy[rank] = (with(rank), busy[rank].1 + load.bytes);
                    placed.push(Shard { rank, ..shard });
                    break;
                }
                // a good part of the largest room that there is
                let row = self.model.tables[shard.table].bytes_of(1, shard.width());
                let room = busy.iter().map(|b| self.memory - b.1).max().unwrap_or(0);
                let rank = least_busy(row.max(room / 2))?;
                let end = shard.rows.start + (self.memory - busy[rank].1) / row;
                let part = Shard { rank, rows: shard.rows.start..end, ..shard.clone() };
                let part_load = self.model.load(&part);
                busy[rank] =
                    (busy[rank].0 + self.model.work(&part_load, rank), busy[rank].1 + part_load.bytes);
                placed.push(part);
                shard.rows.start = end;
                load = self.model.load(&shard);
            }
        }
        Some(Layout::new(self.model, placed))
    }

    /// Moves a shard off the slowest rank, or swaps two, while the slower of both ranks gets faster.
    fn refine(&self, layout: &mut Layout) {
        let seconds = |rank: usize, held: &Load, l: &Layout| self.model.seconds(rank, held, &l.total);
        for _ in 0..4 * layout.shards.len() {
            let from = self.slowest(layout);
            let now = seconds(from, &layout.held[from], layout);
            // (slower of both after it, place on `from`, other rank, place there)
            let mut best: Option<(f64, usize, usize, Option<usize>)> = None;
            for (place, &i) in layout.on[from].iter().enumerate() {
                let load = layout.loads[i];
                let rest = layout.held[from] - load;
                for to in (0..layout.held.len()).filter(|&r| r != from) {
                    let mut consider = |back: Option<usize>| {
                        let other = back.map_or(Load::default(), |p| layout.loads[layout.on[to][p]]);
                        let (a, b) = (rest + other, layout.held[to] - other + load);
                        if a.bytes > self.memory || b.bytes > self.memory {
                            return;
                        }
                        let after = seconds(from, &a, layout).max(seconds(to, &b, layout));
                        if after < now * (1.0 - 1e-9) && best.is_none_or(|b| after < b.0) {
                            best = Some((after, place, to, back));
                        }
                    };
                    consider(None);
                    (0..layout.on[to].len()).for_each(|p| consider(Some(p)));
                }
            }
            let Some((_, place, to, back)) = best else { break };
            let back = back.map(|p| layout.on[to].swap_remove(p));
            let i = layout.on[from].swap_remove(place);
            layout.on[to].push(i);
            layout.on[from].extend(back);
            layout.add_up(from);
            layout.add_up(to);
        }
    }
}

/// Columns in parts that begin at multiples of [`COLUMNS`].
fn equal_columns(width: u32, parts: u64) -> Vec<Range<u32>> {
    let units = u64::from(width / COLUMNS);
    let cut = |i: u64| if i == parts { width } else { (units * i / parts) as u32 * COLUMNS };
    (0..parts).map(|i| cut(i)..cut(i + 1)).collect()
}

#[cfg(test)]
#[path = "planner_tests.rs"]
mod tests;
