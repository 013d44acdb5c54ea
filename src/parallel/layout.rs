//! Where the rows of the model's tables lie, as the runtime needs it.
//!
//! The model packs several columns into one table buffer; a placement speaks of columns. Here a rank's part of a packed
//! table is a [`Piece`]: row ranges of the packed table, one below the other in one local table, for a range of columns.

use crate::graph::StateId;
use crate::model::build::FeatureSpec;
use std::ops::Range;

/// What one rank holds of one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Whose it is.
    pub rank: usize,
    /// The packed table.
    pub table: usize,
    /// Columns of its rows.
    pub columns: Range<usize>,
    /// Rows of the packed table, rising and apart; they follow one another in the local table.
    pub ranges: Vec<Range<u32>>,
}

impl Piece {
    /// Rows of the local table.
    pub fn rows(&self) -> usize {
        self.ranges.iter().map(|r| (r.end - r.start) as usize).sum()
    }

    /// Values a row.
    pub fn width(&self) -> usize {
        self.columns.len()
    }

    /// The packed table.
    pub fn table(&self) -> usize {
        self.table
    }

    /// The local table in a rank's state, from the whole one.
    pub fn state_id(&self, table: &StateId) -> StateId {
        table.part(self.columns.clone())
    }

    /// Of rising ids of the packed table those that lie here: calls `f(place among them, local row)`.
    pub fn find(&self, ids: &[u32], mut f: impl FnMut(usize, u32)) {
        let mut local = 0;
        let mut from = 0;
        for r in &self.ranges {
            from += ids[from..].partition_point(|&id| id < r.start);
            while from < ids.len() && ids[from] < r.end {
                f(from, local + ids[from] - r.start);
                from += 1;
            }
            local += r.end - r.start;
        }
    }
}

/// A table of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableShape {
    /// Rows.
    pub rows: usize,
    /// Values a row.
    pub width: usize,
}

/// All pieces of all tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Ranks.
    pub world: usize,
    /// The model's packed tables.
    pub tables: Vec<TableShape>,
    /// By rank, table, columns.
    pub pieces: Vec<Piece>,
}

/// A part of a column's table, by the column's name: what a placement consists of.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    /// The column that owns the table.
    pub column: &'a str,
    /// Rows of that column's table.
    pub rows: Range<u32>,
    /// Columns of its rows.
    pub columns: Range<usize>,
    /// Where it lies.
    pub rank: usize,
}

impl Layout {
    /// Puts parts together. They must cover every value of every table once (a checked placement does).
    ///
    /// # Errors
    /// A part of a column that no table has, or values that are covered never or twice, in one line.
    pub fn new(
        world: usize,
        features: &FeatureSpec,
        width: usize,
        parts: &[Part<'_>],
    ) -> Result<Layout, String> {
        let tables: Vec<TableShape> = features
            .tables
            .iter()
            .map(|t| TableShape {
                rows: t.columns.iter().map(|c| c.1).sum(),
                width: t.width.unwrap_or(width),
            })
            .collect();
        let mut pieces: Vec<Piece> = vec![];
        for p in parts {
            let found = features.tables.iter().enumerate().find_map(|(t, spec)| {
                let mut at = 0;
                for (name, rows) in &spec.columns {
                    if name == p.column {
                        return Some((t, at as u32));
                    }
                    at += rows;
                }
                None
            });
            let (table, offset) =
                found.ok_or_else(|| format!("no table of the model is {:?}'s", p.column))?;
            let rows = offset + p.rows.start..offset + p.rows.end;
            let same = |q: &&mut Piece| q.rank == p.rank && q.table == table && q.columns == p.columns;
            match pieces.iter_mut().find(same) {
                Some(q) => q.ranges.push(rows),
                None => {
                    pieces.push(Piece { rank: p.rank, table, columns: p.columns.clone(), ranges: vec![rows] })
                }
            }
        }
        for p in &mut pieces {
            p.ranges.sort_by_key(|r| r.start);
            // neighbours become one
            p.ranges.dedup_by(|next, first| {
                let joins = next.start == first.end;
                if joins {
                    first.end = next.end;
                }
                joins
            });
        }
        pieces.sort_by_key(|p| (p.rank, p.table, p.columns.start));
        let layout = Layout { world, tables, pieces };
        layout.check()?;
        Ok(layout)
    }

    fn check(&self) -> Result<(), String> {
        for (t, shape) in self.tables.iter().enumerate() {
            let mine = || self.pieces.iter().filter(move |p| p.table == t);
            let values: usize = mine().map(|p| p.rows() * p.width()).sum();
            let inside = mine().all(|p| {
                p.rank < self.world
                    && p.columns.end <= shape.width
                    && p.ranges.last().is_none_or(|r| r.end as usize <= shape.rows)
                    && p.ranges.windows(2).all(|w| w[0].end <= w[1].start)
            });
            if !inside || values != shape.rows * shape.width {
                return Err(format!(
                    "the parts of table {t} hold {values} values; it has {} rows of {}",
                    shape.rows, shape.width
                ));
            }
        }
        Ok(())
    }

    /// Places in `pieces` of what a rank holds.
    pub fn of(&self, rank: usize) -> Range<usize> {
        self.pieces.partition_point(|p| p.rank < rank)..self.pieces.partition_point(|p| p.rank <= rank)
    }

    /// Whether some row's values lie on several ranks.
    pub fn splits_columns(&self) -> bool {
        self.pieces.iter().any(|p| p.width() < self.tables[p.table].width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::build::EmbeddingSpec;

    pub(crate) fn features() -> FeatureSpec {
        let table = |columns: &[(&str, usize)], width| EmbeddingSpec {
            columns: columns.iter().map(|(n, r)| (n.to_string(), *r)).collect(),
            width,
            ..EmbeddingSpec::default()
        };
        FeatureSpec {
            numeric: 0,
            tables: vec![table(&[("a", 10), ("b", 4), ("c", 6)], None), table(&[("d", 8)], Some(2))],
        }
    }

    #[test]
    fn parts_become_pieces() {
        let f = features();
        let part = |column, rows, columns, rank| Part { column, rows, columns, rank };
        let parts = [
            part("a", 0..10, 0..4, 1),
            part("b", 0..4, 0..4, 0),
            part("c", 0..2, 0..4, 1),
            part("c", 2..6, 0..4, 0),
            part("d", 0..8, 0..1, 0),
            part("d", 0..8, 1..2, 1),
        ];
        let l = Layout::new(2, &f, 4, &parts).unwrap();
        assert_eq!(l.of(0), 0..2);
        assert_eq!(l.pieces[0].ranges, [10..14, 16..20]);
        assert_eq!(l.pieces[2].ranges, [0..10, 14..16]);
        assert!(l.splits_columns());
        let mut seen = vec![];
        l.pieces[2].find(&[3, 9, 12, 14, 15, 18], |at, row| seen.push((at, row)));
        assert_eq!(seen, [(0, 3), (1, 9), (3, 10), (4, 11)]);
        let e = Layout::new(2, &f, 4, &parts[..5]).unwrap_err();
        assert!(e.contains("table 1 hold 8 values"), "{e}");
        assert!(Layout::new(1, &f, 4, &parts).is_err(), "rank 1 of 1");
    }
}
