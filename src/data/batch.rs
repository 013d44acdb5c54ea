//! Batches of a fixed size, with the ids of each packed embedding table sorted for its gradient.
//!
//! An embedding gradient needs, for each table row in the batch, the places where it occurs. The
//! host finds them while it builds the batch: occurrences ordered by (row, place), the bounds of each
//! row's run, and the distinct rows. One writer per row then suffices: deterministic, no atomics.

use std::ops::Range;
use std::sync::Arc;

use super::error::DataError;
use super::fit::Fit;
use super::lengths::Lengths;
use super::rows::{ListIds, Rows};
use crate::ops::embedding::Pool;
use crate::ops::sparse_index::SparseIndex;

/// Fills [`SparseIds::unique`] after the last distinct row.
pub const NO_ROW: u32 = u32::MAX;

/// Columns that share one table buffer, one below the other; or one table that several columns, or a list, use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLayout {
    /// Single-valued columns, by their place among these; empty where the table is pooled.
    pub columns: Vec<usize>,
    /// First row of each column in the packed table.
    pub offsets: Vec<u32>,
    /// Rows of the packed table.
    pub rows: u32,
    /// A table whose ids come in bags.
    pub pooled: Option<PooledLayout>,
}

/// A table that is looked up by bags of ids, several bags an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PooledLayout {
    /// The bags of an example, in slot order.
    pub bags: Vec<Bag>,
    /// The mean of a bag's rows rather than their sum.
    pub mean: bool,
    /// How long the lists of each multi-valued column are, by its place among these; empty where that is not known.
    pub lengths: Vec<Lengths>,
}

impl PooledLayout {
    /// Ids of an example, at most.
    pub fn capacity(&self) -> usize {
        self.bags.iter().map(Bag::most).sum()
    }

    /// Ids of a batch of `rows` examples, N. No batch of training rows has more; one of other rows may, and ends early
    /// ([`Fit`]). One example always fits.
    pub fn ids(&self, rows: usize) -> usize {
        let of = |bag: &Bag| {
            let most = rows.saturating_mul(bag.most());
            match bag {
                Bag::List { column, most: each } => {
                    self.lengths.get(*column).map_or(most, |l| l.longest(rows, *each).min(most))
                }
                Bag::Single(_) => most,
            }
        };
        self.bags.iter().map(of).fold(0, usize::saturating_add).max(self.capacity())
    }
}

/// Where a bag's ids come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bag {
    /// A single-valued column, by its place among these.
    Single(usize),
    /// A multi-valued column.
    List {
        /// Its place among these.
        column: usize,
        /// Ids that count, the first ones.
        most: u32,
    },
}

impl Bag {
    /// Ids of an example, at most.
    pub fn most(&self) -> usize {
        if let Bag::List { most, .. } = self { *most as usize } else { 1 }
    }
}

impl GroupLayout {
    /// Packs `columns` in the given order; `table_rows` has the size of every categorical column.
    pub fn pack(columns: Vec<usize>, table_rows: &[u32]) -> Result<GroupLayout, DataError> {
        let mut offsets = Vec::with_capacity(columns.len());
        let mut rows = 0u64;
        for &column in &columns {
            let Some(&n) = table_rows.get(column) else {
                let problem =
                    format!("column {column} of an embedding group, the schema has {}", table_rows.len());
                return Err(DataError::Batch { problem });
            };
            offsets.push(rows as u32);
            rows += u64::from(n);
            if rows >= u64::from(NO_ROW) {
                return Err(DataError::TooMany {
                    what: "rows of one embedding table".into(),
                    count: rows,
                    limit: u64::from(NO_ROW) - 1,
                    remedy: "lower data.buckets or data.max_size, or raise data.min_count",
                });
            }
        }
        Ok(GroupLayout { columns, offsets, rows: rows as u32, pooled: None })
    }

    /// A table of `rows` rows that is looked up by bags.
    pub fn pooled(rows: u32, layout: PooledLayout) -> GroupLayout {
        GroupLayout { columns: vec![], offsets: vec![], rows, pooled: Some(layout) }
    }

    /// Ids of a batch of `capacity` examples, at most: N.
    pub fn ids(&self, capacity: usize) -> usize {
        match &self.pooled {
            None => capacity * self.columns.len(),
            Some(pooled) => pooled.ids(capacity),
        }
    }
}

/// The ids of one group in a batch. B = batch capacity, C = columns of the group, N = B·C; of a pooled table N =
/// [`PooledLayout::ids`], R = B times its bags.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SparseIds {
    /// `[B, C]`, rows of the packed table; padding rows hold each column's out-of-vocabulary row. `[N]` of a pooled
    /// table, bag after bag, 0 after the last.
    pub ids: Vec<u32>,
    /// `[R + 1]`, bounds of each bag in `ids`; empty unless the table is pooled.
    pub offsets: Vec<u32>,
    /// `[N]`, the factor of each occurrence, in the order of `order`; empty unless the table is pooled.
    pub scale: Vec<f32>,
    /// `[N]`, occurrences (b·C + j, or the bag) of the real rows by falling into place: sorted by (packed row,
    /// occurrence); zeros after the last.
    pub order: Vec<u32>,
    /// `[N + 1]`, start of each distinct row's run in `order`; the number of real occurrences from
    /// the end of the last run on, so that later segments are empty.
    pub segments: Vec<u32>,
    /// `[N]`, packed row of each segment, rising; [`NO_ROW`] after the last.
    pub unique: Vec<u32>,
    /// Distinct rows.
    pub n_unique: usize,
}

/// One batch; every array has its full size, whatever the number of real rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Real rows; they come first.
    pub rows: usize,
    /// Real rows of all ranks' batches together.
    pub total: usize,
    /// Rows of every array, B.
    pub capacity: usize,
    /// `[B, F]`, transformed; 0 in padding rows.
    pub numeric: Vec<f32>,
    /// `[B, columns]`, column-local ids; 0 in padding rows.
    pub ids: Vec<u32>,
    /// Multi-valued columns: of each real row its column-local ids.
    pub lists: Vec<ListIds>,
    /// `[B]`, 0 or 1; 0 in padding and unlabelled rows.
    pub labels: Vec<f32>,
    /// `[B]`, the rows' weights (1 where the data has none), 0 for padding.
    pub weights: Vec<f32>,
    /// The group of each real row; empty where the data has none.
    pub group_ids: Vec<u64>,
    /// `[rows, passed columns]`, text for `predict`'s output; empty elsewhere.
    pub passed: Vec<String>,
    /// One for each group.
    pub groups: Vec<SparseIds>,
}

impl Batch {
    /// A batch of the same size without a real row.
    pub fn padding(&self) -> Batch {
        let zeros = |n: usize| vec![0.0; n];
        let empty = |s: &SparseIds| SparseIds {
            ids: vec![0; s.ids.len()],
            order: vec![0; s.order.len()],
            segments: vec![0; s.segments.len()],
            unique: vec![NO_ROW; s.unique.len()],
            offsets: vec![0; s.offsets.len()],
            scale: vec![0.0; s.scale.len()],
            n_unique: 0,
        };
        Batch {
            rows: 0,
            total: 0,
            capacity: self.capacity,
            numeric: zeros(self.numeric.len()),
            ids: vec![0; self.ids.len()],
            labels: zeros(self.labels.len()),
            weights: zeros(self.weights.len()),
            lists: vec![],
            group_ids: vec![],
            passed: vec![],
            groups: self.groups.iter().map(empty).collect(),
        }
    }
}

/// Builds batches, reusing the memory of those that come back through [`BatchBuilder::recycle`].
#[derive(Debug)]
pub struct BatchBuilder {
    capacity: usize,
    features: usize,
    columns: usize,
    groups: Arc<[GroupLayout]>,
    free: Vec<Batch>,
    keys: Vec<u64>,
    spare: Vec<u64>,
    index: SparseIndex,
}

impl BatchBuilder {
    /// A builder for batches of `capacity` rows with `features` numbers and `columns` ids each.
    pub fn new(
        capacity: usize,
        features: usize,
        columns: usize,
        groups: Arc<[GroupLayout]>,
    ) -> Result<BatchBuilder, DataError> {
        let fail = |problem: String| Err(DataError::Batch { problem });
        if capacity == 0 {
            return fail("0 rows a batch, expected at least 1".into());
        }
        if capacity.checked_mul(columns.max(features).max(1)).is_none_or(|n| n >= u32::MAX as usize) {
            return fail(format!(
                "{capacity} rows a batch are too many for {columns} columns; use a smaller batch"
            ));
        }
        for g in groups.iter() {
            if g.columns.len() != g.offsets.len() || g.columns.len() > columns {
                return fail(format!(
                    "an embedding group has {} columns and {} offsets",
                    g.columns.len(),
                    g.offsets.len()
                ));
            }
            let bags = g.pooled.iter().flat_map(|p| &p.bags);
            let bags = bags.filter_map(|b| if let Bag::Single(c) = b { Some(c) } else { None });
            if let Some(c) = g.columns.iter().chain(bags).find(|&&c| c >= columns) {
                return fail(format!("an embedding group names column {c}, the data has {columns}"));
            }
            if let Some(pooled) = g.pooled.as_ref().filter(|p| p.ids(capacity) >= u32::MAX as usize) {
                let most = pooled.capacity();
                return fail(format!(
                    "{capacity} rows a batch are too many for lists of {most} values; use a smaller batch, or set the column's max_length"
                ));
            }
        }
        Ok(BatchBuilder {
            capacity,
            features,
            columns,
            groups,
            free: Vec::new(),
            keys: Vec::new(),
            spare: Vec::new(),
            index: SparseIndex::default(),
        })
    }

    /// Which rows come together in a batch.
    pub fn fit(&self) -> Fit {
        Fit::new(self.capacity, Arc::clone(&self.groups))
    }

    /// Gives a batch's memory back.
    pub fn recycle(&mut self, batch: Batch) {
        if batch.capacity == self.capacity && batch.groups.len() == self.groups.len() {
            self.free.push(batch);
        }
    }

    /// The batch of the rows that `indices` names, at most `capacity` of them.
    pub fn gather(&mut self, rows: &Rows, indices: &[u32]) -> Batch {
        self.build(rows, indices.iter().map(|&i| i as usize))
    }

    /// The batch of consecutive rows, at most `capacity` of them.
    pub fn range(&mut self, rows: &Rows, range: Range<usize>) -> Batch {
        self.build(rows, range)
    }

    fn build(&mut self, rows: &Rows, indices: impl Iterator<Item = usize>) -> Batch {
        let (b, f, c) = (self.capacity, self.features, self.columns);
        assert_eq!((rows.features, rows.columns), (f, c), "rows of the width the builder was made for");
        let mut batch = self.free.pop().unwrap_or_default();
        batch.capacity = b;
        batch.numeric.clear();
        batch.ids.clear();
        batch.labels.clear();
        batch.weights.clear();
        batch.group_ids.clear();
        batch.passed.clear();
        batch.lists.resize_with(rows.lists.len(), ListIds::default);
        batch.lists.iter_mut().for_each(|l| {
            l.ids.clear();
            l.ends.clear();
        });
        let passed = rows.passed.len() / rows.len().max(1);
        for i in indices {
            batch.numeric.extend_from_slice(&rows.numeric[i * f..(i + 1) * f]);
            batch.ids.extend_from_slice(&rows.ids[i * c..(i + 1) * c]);
            batch.labels.push(f32::from(u8::from(rows.labels[i] == 1)));
            batch.weights.push(rows.weights.get(i).copied().unwrap_or(1.0));
            batch.group_ids.extend(rows.groups.get(i));
            batch.passed.extend_from_slice(&rows.passed[i * passed..(i + 1) * passed]);
            for (list, all) in batch.lists.iter_mut().zip(&rows.lists) {
                list.ids.extend_from_slice(all.row(i));
                list.ends.push(list.ids.len() as u32);
            }
        }
        batch.rows = batch.labels.len();
        batch.total = batch.rows;
        assert!(batch.rows <= b, "{} rows for a batch of {b}", batch.rows);
        batch.numeric.resize(b * f, 0.0);
        batch.ids.resize(b * c, 0);
        batch.labels.resize(b, 0.0);
        batch.weights.resize(b, 0.0);
        let groups = Arc::clone(&self.groups);
        batch.groups.resize_with(groups.len(), SparseIds::default);
        for (layout, sparse) in groups.iter().zip(&mut batch.groups) {
            match &layout.pooled {
                None => self.fill_group(layout, &batch.ids, batch.rows, sparse),
                Some(pooled) => {
                    self.fill_bags(layout.ids(b), pooled, &batch.ids, &batch.lists, batch.rows, sparse);
                }
            }
        }
        batch
    }

    fn fill_bags(
        &mut self,
        total: usize,
        pooled: &PooledLayout,
        ids: &[u32],
        lists: &[ListIds],
        rows: usize,
        out: &mut SparseIds,
    ) {
        out.ids.clear();
        out.offsets.clear();
        out.offsets.push(0);
        for row in 0..rows {
            for bag in &pooled.bags {
                match *bag {
                    Bag::Single(c) => out.ids.push(ids[row * self.columns + c]),
                    Bag::List { column, most } => {
                        out.ids.extend(lists[column].row(row).iter().take(most as usize));
                    }
                }
                out.offsets.push(out.ids.len() as u32);
            }
        }
        // padding rows have empty bags
        out.offsets.resize(self.capacity * pooled.bags.len() + 1, out.ids.len() as u32);
        out.ids.resize(total, 0);
        let pool = if pooled.mean { Pool::Mean } else { Pool::Sum };
        self.index.set_bags(&out.ids, &out.offsets, None, pool);
        for (mine, new) in [
            (&mut out.order, &self.index.order),
            (&mut out.segments, &self.index.segments),
            (&mut out.unique, &self.index.unique),
        ] {
            mine.clone_from(new);
        }
        out.scale.clone_from(&self.index.scale);
        out.n_unique = out.unique.iter().take_while(|&&u| u != NO_ROW).count();
    }

    fn fill_group(&mut self, layout: &GroupLayout, ids: &[u32], rows: usize, out: &mut SparseIds) {
        let (width, total) = (layout.columns.len(), self.capacity * layout.columns.len());
        out.ids.clear();
        for row in ids.chunks_exact(self.columns.max(1)).take(self.capacity) {
            out.ids.extend(layout.columns.iter().zip(&layout.offsets).map(|(&c, &offset)| offset + row[c]));
        }
        let real = &out.ids[..rows * width];
        debug_assert!(real.iter().all(|&id| id < layout.rows), "ids of another encoder");
        self.keys.clear();
        self.keys.extend(real.iter().enumerate().map(|(place, &id)| u64::from(id) << 32 | place as u64));
        let bits = u32::BITS - layout.rows.saturating_sub(1).leading_zeros();
        sort_by_row(&mut self.keys, &mut self.spare, bits);

        out.order.clear();
        out.segments.clear();
        out.unique.clear();
        for (i, &key) in self.keys.iter().enumerate() {
            let row = (key >> 32) as u32;
            if out.unique.last() != Some(&row) {
                out.unique.push(row);
                out.segments.push(i as u32);
            }
            out.order.push(key as u32);
        }
        out.n_unique = out.unique.len();
        out.order.resize(total, 0);
        out.segments.resize(total + 1, self.keys.len() as u32);
        out.unique.resize(total, NO_ROW);
    }
}

/// Sorts keys (row << 32 | place) by row, whose values have `bits` bits. The places rise on entry and
/// every pass is stable, so the result is ordered by (row, place).
fn sort_by_row(keys: &mut Vec<u64>, spare: &mut Vec<u64>, bits: u32) {
    const DIGIT: u32 = 11; // 2,048 counters stay in the first-level cache
    spare.clear();
    spare.resize(keys.len(), 0);
    for shift in (0..bits).step_by(DIGIT as usize) {
        let digit = |key: u64| (key >> (32 + shift)) as usize & ((1 << DIGIT) - 1);
        let mut starts = [0u32; 1 << DIGIT];
        keys.iter().for_each(|&k| starts[digit(k)] += 1);
        let mut sum = 0;
        for start in &mut starts {
            sum += std::mem::replace(start, sum);
        }
        for &key in keys.iter() {
            let at = &mut starts[digit(key)];
            spare[*at as usize] = key;
            *at += 1;
        }
        std::mem::swap(keys, spare);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn rows(n: usize, features: usize, sizes: &[u32], salt: u32) -> Rows {
        let mut rows = Rows::new(features, sizes.len());
        for i in 0..n as u32 {
            rows.numeric.extend((0..features).map(|k| (i + salt) as f32 + k as f32 / 8.0));
            rows.ids.extend(
                sizes.iter().enumerate().map(|(j, s)| {
                    (i.wrapping_mul(2_654_435_761) ^ (salt + j as u32)).wrapping_mul(40_503) % s
                }),
            );
            rows.labels.push((i % 3) as u8); // 2 = unlabelled
        }
        rows
    }

    /// The definition: for each packed row, the places where it occurs.
    fn check_group(layout: &GroupLayout, batch: &Batch, g: &SparseIds) {
        let width = layout.columns.len();
        let total = batch.capacity * width;
        let all = batch.ids.len() / batch.capacity;
        let mut places: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for b in 0..batch.capacity {
            for j in 0..width {
                let packed = layout.offsets[j] + batch.ids[b * all + layout.columns[j]];
                assert_eq!(g.ids[b * width + j], packed);
                if b < batch.rows {
                    places.entry(packed).or_default().push((b * width + j) as u32);
                }
            }
        }
        let real = batch.rows * width;
        assert_eq!((g.order.len(), g.segments.len(), g.unique.len()), (total, total + 1, total));
        assert_eq!(g.n_unique, places.len());
        for (s, (row, want)) in places.iter().enumerate() {
            assert_eq!(g.unique[s], *row);
            assert_eq!(&g.order[g.segments[s] as usize..g.segments[s + 1] as usize], &want[..]);
        }
        assert!(g.segments[g.n_unique..].iter().all(|&s| s as usize == real));
        assert!(g.unique[g.n_unique..].iter().all(|&u| u == NO_ROW));
        assert!(g.order[real..].iter().all(|&o| o == 0));
    }

    proptest! {
        #[test]
        fn batches_follow_their_definition(
            n in 0usize..20,
            capacity in 1usize..20,
            features in 0usize..4,
            sizes in prop::collection::vec(prop_oneof![1u32..6, 1u32..9_000_000], 1..5),
            split in 0usize..5,
            salt in any::<u16>(),
        ) {
            let data = rows(n, features, &sizes, salt.into());
            let split = split.min(sizes.len());
            let all: Vec<usize> = (0..sizes.len()).rev().collect();
            let groups: Arc<[GroupLayout]> = [&all[..split], &all[split..]]
                .map(|c| GroupLayout::pack(c.to_vec(), &sizes).unwrap())
                .into();
            let mut builder = BatchBuilder::new(capacity, features, sizes.len(), Arc::clone(&groups)).unwrap();
            let indices: Vec<u32> = (0..n as u32).rev().take(capacity).collect();
            let batch = builder.gather(&data, &indices);
            prop_assert_eq!((batch.rows, batch.capacity), (indices.len(), capacity));
            for b in 0..capacity {
                let numeric = &batch.numeric[b * features..(b + 1) * features];
                let ids = &batch.ids[b * sizes.len()..(b + 1) * sizes.len()];
                match indices.get(b).map(|&i| i as usize) {
                    Some(i) => {
                        prop_assert_eq!(numeric, &data.numeric[i * features..(i + 1) * features]);
                        prop_assert_eq!(ids, &data.ids[i * sizes.len()..(i + 1) * sizes.len()]);
                        prop_assert_eq!((batch.weights[b], batch.labels[b] == 1.0), (1.0, data.labels[i] == 1));
                    }
                    None => {
                        prop_assert!(numeric.iter().all(|&v| v == 0.0) && ids.iter().all(|&v| v == 0));
                        prop_assert_eq!((batch.weights[b], batch.labels[b]), (0.0, 0.0));
                    }
                }
            }
            groups.iter().zip(&batch.groups).for_each(|(l, g)| check_group(l, &batch, g));
            // Used memory leaves no trace.
            let want = batch.clone();
            builder.recycle(batch);
            let other = builder.range(&data, 0..n.min(1));
            builder.recycle(other);
            prop_assert_eq!(builder.gather(&data, &indices), want);
        }
    }

    #[test]
    fn wide_tables_sort_through_all_digits() {
        let sizes = [3_000_000_000, 1_000_000_000];
        let layout = GroupLayout::pack(vec![0, 1], &sizes).unwrap();
        let groups: Arc<[GroupLayout]> = [layout.clone()].into();
        let mut builder = BatchBuilder::new(500, 1, 2, groups).unwrap();
        let batch = builder.range(&rows(400, 1, &sizes, 9), 0..400);
        check_group(&layout, &batch, &batch.groups[0]);
        assert_eq!(batch.groups[0].ids[500 * 2 - 1], 3_000_000_000, "padding points at the column's row 0");
    }

    #[test]
    fn bags_hold_singles_and_lists_up_to_their_length() {
        let mut data = rows(3, 1, &[9], 4);
        data.weights = vec![0.5, 1.0, 2.0];
        data.groups = vec![7, 7, 8];
        data.lists = vec![ListIds { ends: vec![3, 3, 4], ids: vec![5, 6, 5, 8] }];
        let layout = PooledLayout {
            bags: vec![Bag::Single(0), Bag::List { column: 0, most: 2 }],
            mean: true,
            lengths: vec![],
        };
        let groups: Arc<[GroupLayout]> = [GroupLayout::pooled(9, layout)].into();
        let mut builder = BatchBuilder::new(4, 1, 1, groups).unwrap();
        let batch = builder.gather(&data, &[2, 0, 1]);
        let (g, id) = (&batch.groups[0], |i: usize| data.ids[i]);
        assert_eq!(g.offsets, [0, 1, 2, 3, 5, 6, 6, 6, 6]);
        assert_eq!(g.ids, [id(2), 8, id(0), 5, 6, id(1), 0, 0, 0, 0, 0, 0]);
        assert_eq!((&batch.weights[..], &batch.group_ids[..]), (&[2.0, 0.5, 1.0, 0.0][..], &[8, 7, 7][..]));
        // the occurrence of 6 stands for half of bag 3
        let at = g.unique.iter().position(|&u| u == 6).unwrap();
        let place = g.segments[at] as usize;
        assert_eq!((g.order[place], g.scale[place]), (3, 0.5));
        assert!(g.n_unique >= 4 && g.unique.len() == 12 && g.segments.len() == 13);
    }

    #[test]
    fn impossible_layouts_are_errors() {
        let text = GroupLayout::pack(vec![0, 1], &[u32::MAX - 5, 10]).unwrap_err().to_string();
        assert!(text.contains("rows of one embedding table: 4294967300"), "{text}");
        assert!(GroupLayout::pack(vec![2], &[1, 1]).is_err());
        let new = |b, columns: Vec<usize>| {
            let offsets = vec![0; columns.len()];
            BatchBuilder::new(b, 1, 2, [GroupLayout { columns, offsets, rows: 5, pooled: None }].into())
        };
        assert!(new(1, vec![1]).is_ok());
        assert!(new(0, vec![1]).is_err() && new(1, vec![2]).is_err() && new(usize::MAX, vec![1]).is_err());
    }
}
