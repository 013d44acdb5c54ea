//! Which rank holds which part of which embedding table.
//!
//! A [`Placement`] is a list of [`Shard`]s, rectangles of rows and columns, such that every value of every table lies
//! in exactly one of them. As TOML it is a file that a person can edit:
//!
//! ```toml
//! world = 4
//!
//! [[shards]]
//! table = "user_id"
//! rows = [0, 50000]     # first, end; without it all rows
//! columns = [0, 16]     # likewise
//! rank = 2
//! ```

use std::fmt::Write;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use toml::Spanned;

/// The most ranks of a placement.
pub const MAX_WORLD: usize = 65_536;

/// An embedding table as the planner sees it: `[rows, width]`, and how it is used.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// The column that owns it.
    pub name: String,
    /// Rows, those of unknown and missing values included.
    pub rows: u64,
    /// Values a row.
    pub width: u32,
    /// Ids that one example looks up in it, on average: 1 for a single-valued column, the mean length of a list, and
    /// the sum of both where columns share the table.
    pub lookups: f64,
    /// Share of the ids in one rank's batch that are distinct, in (0, 1]; 1 where it is not known.
    pub unique: f64,
    /// Whether rows stand in the order of falling frequency, as those of a vocabulary do; hashed rows do not.
    pub ranked: bool,
    /// Scalars that the optimiser keeps for a row: 1 for row-wise Adagrad.
    pub row_state: u32,
    /// Scalars that it keeps for a value: 2 for Adam.
    pub value_state: u32,
}

impl Table {
    /// Bytes of so many rows and columns with their optimiser state, in f32.
    pub fn bytes_of(&self, rows: u64, columns: u32) -> u64 {
        4 * rows * (u64::from(columns) * u64::from(1 + self.value_state) + u64::from(self.row_state))
    }

    /// Bytes of the whole table with its optimiser state.
    pub fn bytes(&self) -> u64 {
        self.bytes_of(self.rows, self.width)
    }
}

/// A rectangle of a table, and the rank that holds it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    /// Which of the tables.
    pub table: usize,
    /// Its rows.
    pub rows: Range<u64>,
    /// Its columns.
    pub columns: Range<u32>,
    /// Where it lies.
    pub rank: usize,
}

impl Shard {
    /// A whole table.
    pub fn whole(index: usize, table: &Table, rank: usize) -> Shard {
        Shard { table: index, rows: 0..table.rows, columns: 0..table.width, rank }
    }

    /// Columns that it has.
    pub fn width(&self) -> u32 {
        self.columns.end - self.columns.start
    }

    /// Bytes with optimiser state.
    pub fn bytes(&self, tables: &[Table]) -> u64 {
        tables[self.table].bytes_of(self.rows.end - self.rows.start, self.width())
    }

    /// Whether it is a whole table.
    pub fn is_whole(&self, tables: &[Table]) -> bool {
        let t = &tables[self.table];
        self.rows == (0..t.rows) && self.columns == (0..t.width)
    }
}

/// Where every table lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    world: usize,
    /// By table, then first row, then first column.
    shards: Vec<Shard>,
}

/// Why shards are no placement, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// Not TOML of this form.
    #[error("{place}: not a plan: {message}")]
    Toml {
        /// `file:line`.
        place: String,
        /// The parser's words.
        message: String,
    },
    /// The number of ranks is none.
    #[error("{place}world = {world}, expected 1 to 65536 ranks")]
    World {
        /// `file:line: `, or nothing.
        place: String,
        /// As given.
        world: usize,
    },
    /// A table that the model does not have.
    #[error("{place}table {name:?} is none of this model's; they are {known}")]
    Unknown {
        /// `file:line: `, or nothing.
        place: String,
        /// As given.
        name: String,
        /// The names that would do.
        known: String,
    },
    /// A rank that does not exist.
    #[error("{place}{table}: rank = {rank}, but world = {world}: ranks go from 0 to {}", world - 1)]
    Rank {
        /// `file:line: `, or nothing.
        place: String,
        /// The table.
        table: String,
        /// As given.
        rank: usize,
        /// Number of ranks.
        world: usize,
    },
    /// A range that is empty or leaves the table.
    #[error(
        "{place}{table}: {what} = [{start}, {end}], expected [first, end] with first below end and end at most {limit}"
    )]
    Range {
        /// `file:line: `, or nothing.
        place: String,
        /// The table.
        table: String,
        /// `rows` or `columns`.
        what: &'static str,
        /// As given.
        start: u64,
        /// As given.
        end: u64,
        /// What the table has.
        limit: u64,
    },
    /// Values that two shards have.
    #[error("{place}{table}: rows {} to {}, columns {} to {} are on rank {rank} already{at}", rows.start, rows.end, columns.start, columns.end)]
    Overlap {
        /// `file:line: ` of the second, or nothing.
        place: String,
        /// The table.
        table: String,
        /// What both have.
        rows: Range<u64>,
        /// What both have.
        columns: Range<u32>,
        /// Rank of the first.
        rank: usize,
        /// Where the first stands: ` (line 3)`, or nothing.
        at: String,
    },
    /// Values that no shard has.
    #[error("{place}{table}: rows {} to {}, columns {} to {} are on no rank; add [[shards]] with them", rows.start, rows.end, columns.start, columns.end)]
    Gap {
        /// `file: `, or nothing.
        place: String,
        /// The table.
        table: String,
        /// What is missing.
        rows: Range<u64>,
        /// What is missing.
        columns: Range<u32>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPlan {
    world: Spanned<usize>,
    #[serde(default)]
    shards: Vec<RawShard>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawShard {
    table: Spanned<String>,
    rows: Option<Spanned<[u64; 2]>>,
    columns: Option<Spanned<[u32; 2]>>,
    rank: Spanned<usize>,
}

/// Lines of a file by offset.
pub(super) struct Lines<'a> {
    name: &'a str,
    text: &'a str,
}

impl<'a> Lines<'a> {
    pub(super) fn new(name: &'a str, text: &'a str) -> Self {
        Lines { name, text }
    }

    pub(super) fn line(&self, offset: usize) -> usize {
        1 + self.text.bytes().take(offset).filter(|&b| b == b'\n').count()
    }

    /// `file:line`.
    pub(super) fn place(&self, offset: usize) -> String {
        format!("{}:{}", self.name, self.line(offset))
    }
}

/// Where the parts of a shard stand in a file: table, rows, columns, rank.
type Places = [usize; 4];

impl Placement {
    /// Shards that hold every value of every table exactly once, on ranks below `world`.
    pub fn new(world: usize, shards: Vec<Shard>, tables: &[Table]) -> Result<Placement, PlacementError> {
        Self::checked(world, shards.into_iter().map(|s| (s, None)).collect(), tables, None)
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// All shards, by table, then first row, then first column.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The shards that a rank holds, in the order of [`Placement::shards`].
    pub fn shards_of(&self, rank: usize) -> impl Iterator<Item = &Shard> {
        self.shards.iter().filter(move |s| s.rank == rank)
    }

    /// The shards of a table, by first row, then first column.
    pub fn shards_of_table(&self, table: usize) -> &[Shard] {
        let start = self.shards.partition_point(|s| s.table < table);
        let end = self.shards.partition_point(|s| s.table <= table);
        &self.shards[start..end]
    }

    /// The shards that together hold one row of a table, by first column: more than one where it is cut by columns.
    pub fn owner_of(&self, table: usize, row: u64) -> impl Iterator<Item = &Shard> {
        let mut of: Vec<&Shard> =
            self.shards_of_table(table).iter().filter(|s| s.rows.contains(&row)).collect();
        of.sort_by_key(|s| s.columns.start);
        of.into_iter()
    }

    /// Whether the placement is one of these tables; they may be others than those that it was made for.
    pub fn validate(&self, tables: &[Table]) -> Result<(), PlacementError> {
        Self::new(self.world, self.shards.clone(), tables).map(|_| ())
    }

    fn checked(
        world: usize,
        mut shards: Vec<(Shard, Option<Places>)>,
        tables: &[Table],
        lines: Option<&Lines<'_>>,
    ) -> Result<Placement, PlacementError> {
        let place = |at: Option<usize>| match (lines, at) {
            (Some(l), Some(offset)) => format!("{}: ", l.place(offset)),
            (Some(l), None) => format!("{}: ", l.name),
            _ => String::new(),
        };
        if !(1..=MAX_WORLD).contains(&world) {
            return Err(PlacementError::World { place: place(None), world });
        }
        for (s, at) in &shards {
            let part = |k: usize| place(at.map(|a| a[k]));
            let Some(t) = tables.get(s.table) else {
                let (name, known) = (format!("#{}", s.table), names(tables));
                return Err(PlacementError::Unknown { place: part(0), name, known });
            };
            let columns = u64::from(s.columns.start)..u64::from(s.columns.end);
            let ranges = [(1, "rows", s.rows.clone(), t.rows), (2, "columns", columns, u64::from(t.width))];
            for (k, what, range, limit) in ranges {
                if range.is_empty() || range.end > limit {
                    let (table, start, end) = (t.name.clone(), range.start, range.end);
                    return Err(PlacementError::Range { place: part(k), table, what, start, end, limit });
                }
            }
            if s.rank >= world {
                let (table, rank) = (t.name.clone(), s.rank);
                return Err(PlacementError::Rank { place: part(3), table, rank, world });
            }
        }
        shards.sort_by_key(|(s, _)| (s.table, s.rows.start, s.columns.start));
        for (index, t) in tables.iter().enumerate() {
            let start = shards.partition_point(|(s, _)| s.table < index);
            let own = &shards[start..shards.partition_point(|(s, _)| s.table <= index)];
            for (i, (a, at)) in own.iter().enumerate() {
                // those before it that reach into its rows
                for (b, other) in &own[..i] {
                    let rows = a.rows.start.max(b.rows.start)..a.rows.end.min(b.rows.end);
                    let columns = a.columns.start.max(b.columns.start)..a.columns.end.min(b.columns.end);
                    if !rows.is_empty() && !columns.is_empty() {
                        let at_other = match (lines, other) {
                            (Some(l), Some(o)) => format!(" (line {})", l.line(o[0])),
                            _ => String::new(),
                        };
                        return Err(PlacementError::Overlap {
                            place: place(at.map(|a| a[0])),
                            table: t.name.clone(),
                            rows,
                            columns,
                            rank: b.rank,
                            at: at_other,
                        });
                    }
                }
            }
            // no two overlap and none leaves the table: nothing is missing where the areas add up
            let area = |s: &Shard| u128::from(s.rows.end - s.rows.start) * u128::from(s.width());
            let held: u128 = own.iter().map(|(s, _)| area(s)).sum();
            if held < u128::from(t.rows) * u128::from(t.width) {
                let (rows, columns) = gap(own.iter().map(|(s, _)| s), t);
                return Err(PlacementError::Gap { place: place(None), table: t.name.clone(), rows, columns });
            }
        }
        Ok(Placement { world, shards: shards.into_iter().map(|(s, _)| s).collect() })
    }

    /// Reads what [`Placement::to_toml`] writes, or a person; `name` stands for the file in errors.
    pub fn from_toml(name: &str, text: &str, tables: &[Table]) -> Result<Placement, PlacementError> {
        let lines = Lines::new(name, text);
        let raw: RawPlan = toml::from_str(text).map_err(|e| {
            let place = lines.place(e.span().map_or(0, |s| s.start));
            PlacementError::Toml { place, message: e.message().replace('\n', "; ") }
        })?;
        let world = *raw.world.get_ref();
        if !(1..=MAX_WORLD).contains(&world) {
            let place = format!("{}: ", lines.place(raw.world.span().start));
            return Err(PlacementError::World { place, world });
        }
        let mut shards = vec![];
        for s in raw.shards {
            let at = s.table.span().start;
            let Some(table) = tables.iter().position(|t| t.name == *s.table.get_ref()) else {
                let (place, known) = (format!("{}: ", lines.place(at)), names(tables));
                return Err(PlacementError::Unknown { place, name: s.table.into_inner(), known });
            };
            let t = &tables[table];
            let rows = s.rows.as_ref().map_or([0, t.rows], |r| *r.get_ref());
            let columns = s.columns.as_ref().map_or([0, t.width], |c| *c.get_ref());
            let places = [
                at,
                s.rows.map_or(at, |r| r.span().start),
                s.columns.map_or(at, |c| c.span().start),
                s.rank.span().start,
            ];
            let shard = Shard {
                table,
                rows: rows[0]..rows[1],
                columns: columns[0]..columns[1],
                rank: s.rank.into_inner(),
            };
            shards.push((shard, Some(places)));
        }
        Self::checked(world, shards, tables, Some(&lines))
    }

    /// The placement as TOML; [`Placement::from_toml`] gives the same back.
    pub fn to_toml(&self, tables: &[Table]) -> String {
        let mut out = String::from(
            "# Where the embedding tables lie: each shard is some rows and columns of a table, [first, end).\n\
             # Every value must be on exactly one rank; ranks go from 0 to world - 1.\n",
        );
        // writing to a String cannot fail
        let _ = writeln!(out, "world = {}", self.world);
        for s in &self.shards {
            let name = toml::Value::String(tables[s.table].name.clone());
            let _ = write!(
                out,
                "\n[[shards]]\ntable = {name}\nrows = [{}, {}]\ncolumns = [{}, {}]\nrank = {}\n",
                s.rows.start, s.rows.end, s.columns.start, s.columns.end, s.rank
            );
        }
        out
    }
}

/// The names of tables, for an error.
fn names(tables: &[Table]) -> String {
    const MOST: usize = 12;
    let list: Vec<&str> = tables.iter().take(MOST).map(|t| t.name.as_str()).collect();
    match tables.len() {
        0 => "none: it has no categorical columns".into(),
        n if n > MOST => format!("{} and {} more", list.join(", "), n - MOST),
        _ => list.join(", "),
    }
}

/// The first rows and columns that no shard has; there are some.
fn gap<'a>(shards: impl Iterator<Item = &'a Shard>, t: &Table) -> (Range<u64>, Range<u32>) {
    let shards: Vec<&Shard> = shards.collect();
    let mut row_cuts = vec![0, t.rows];
    let mut column_cuts = vec![0, t.width];
    for s in &shards {
        row_cuts.extend([s.rows.start, s.rows.end]);
        column_cuts.extend([s.columns.start, s.columns.end]);
    }
    row_cuts.sort_unstable();
    row_cuts.dedup();
    column_cuts.sort_unstable();
    column_cuts.dedup();
    let free =
        |row: u64, column: u32| !shards.iter().any(|s| s.rows.contains(&row) && s.columns.contains(&column));
    for rows in row_cuts.windows(2) {
        let mut columns = column_cuts.windows(2).skip_while(|c| !free(rows[0], c[0]));
        if let Some(first) = columns.next() {
            let more = columns.take_while(|c| free(rows[0], c[0])).last();
            return (rows[0]..rows[1], first[0]..more.map_or(first[1], |c| c[1]));
        }
    }
    (0..t.rows, 0..t.width)
}

#[cfg(test)]
#[path = "placement_tests.rs"]
mod tests;
