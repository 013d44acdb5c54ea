//! What is in a file's columns, and a schema that fits them: `birkhoff schema`.

use serde::Serialize;

use super::delimited::sample;
use super::error::DataError;
use super::format::{Format, resolve};
use super::guess::guess_label;
use super::header::{First, first_record, is_label, names_of};
use super::lengths::Lengths;
use super::number::{parse_number, plain_label, spaced_number};
use super::reader::{Labels, ReadOptions, RowPolicy, Source};
use super::schema::{CategoricalColumn, Encoding, ListOptions, Pooling, Schema};
use super::split::time_of;
use super::vocab::Interner;

/// Distinct values that are counted one by one.
pub(super) const MOST_DISTINCT: usize = 1 << 20;

/// What was seen in one column.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ColumnSurvey {
    /// Its name.
    pub name: String,
    /// What it is guessed to be.
    pub kind: &'static str,
    /// Rows.
    pub rows: u64,
    /// Rows without a value.
    pub missing: u64,
    /// Distinct values, up to a million.
    pub distinct: usize,
    /// Rows with a decimal number.
    pub numbers: u64,
    /// Rows with a whole number.
    pub whole: u64,
    /// Rows with a number without a fraction, however it is written: 35.0.
    #[serde(skip)]
    pub(super) integral: u64,
    /// Rows with a number that has commas: decimal ones, or between thousands.
    #[serde(skip)]
    pub(super) commas: u64,
    /// Rows with a date.
    pub dates: u64,
    /// Least and greatest number.
    pub range: Option<[f64; 2]>,
    /// Rows with a separator that lists have.
    pub separated: u64,
    /// That separator.
    pub separator: Option<char>,
    /// The first few values.
    pub examples: Vec<String>,
    /// What a person should look at.
    pub warnings: Vec<String>,
    /// Whether its cells are lists.
    pub lists: bool,
    /// Texts that mean "missing" in it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub na: Vec<String>,
    /// How often a count of the rows begins anew; `None`: the values do not count.
    #[serde(skip)]
    pub(super) restarts: Option<u64>,
    #[serde(skip)]
    count: Option<[f64; 2]>,
    /// Files that are looked at.
    #[serde(skip)]
    pub(super) files: u64,
    /// How many values cells have, where they have several.
    #[serde(skip)]
    lengths: Lengths,
    #[serde(skip)]
    pub(super) values: Interner,
    /// Rows of each of them.
    #[serde(skip)]
    pub(super) counts: Vec<u32>,
    #[serde(skip)]
    pub(super) longest: usize,
    #[serde(skip)]
    pub(super) shortest: usize,
}

/// What was seen in files.
#[derive(Clone, Debug, Serialize)]
pub struct Survey {
    /// The format.
    pub format: String,
    /// Whether the first file has a header.
    pub header: bool,
    /// How that was told.
    pub header_rule: String,
    /// Whether blanks around fields are left out: one follows every delimiter.
    pub trim: bool,
    /// Rows that were looked at.
    pub rows: u64,
    /// Rows that could not be read.
    pub skipped: u64,
    /// The first few of these.
    pub problems: Vec<String>,
    /// Whether these are all rows.
    pub complete: bool,
    /// Share of positive rows, where the label is 0 and 1.
    pub label_rate: Option<f64>,
    /// The columns, in file order.
    pub columns: Vec<ColumnSurvey>,
    #[serde(skip)]
    pub(super) shape: Format,
    #[serde(skip)]
    pub(super) options: super::format::FormatOptions,
}

/// Looks at up to `most` rows (0 = all) of a source; `label` is the column to predict, if it is known.
pub fn survey(source: &Source, most: u64, label: Option<&str>) -> Result<Survey, DataError> {
    let path = source.places[0].name();
    let (head, _) = source.places[0].open(&source.format)?;
    let fail = |problem: String| DataError::Format { path: path.clone(), problem };
    if head.iter().all(u8::is_ascii_whitespace) {
        return Err(DataError::Empty { path, expected: "rows of data".into() });
    }
    let shape = resolve(&head, &source.format).map_err(fail)?;
    let mut source = source.clone();
    source.read = ReadOptions { policy: RowPolicy::Skip, labels: Labels::Optional };
    // lists: which columns hold them, in a columnar file
    let mut odd: Vec<(String, String)> = vec![];
    let (names, (header, rule), lists) = match &shape {
        Format::Delimited(d) if d.criteo => {
            // as any other text, so that each column is looked at
            (source.format.format, source.format.header) = (super::format::FormatName::Tsv, Some(false));
            let names = Schema::criteo(super::schema::Transform::Log, true, ENCODING).file;
            (names, (false, "Criteo's log has none"), vec![])
        }
        Format::Delimited(d) => {
            let comment = source.format.comment.clone().into_bytes();
            let mut d = d.clone();
            let mut records = sample(&head, &d, &comment, 200);
            if !d.trim && blank_after_delimiters(&records, d.delimiter) {
                d.trim = true;
                records = sample(&head, &d, &comment, 200);
            }
            source.format.trim = d.trim;
            let Some(first) = records.first() else {
                return Err(DataError::Empty { path, expected: "rows of data".into() });
            };
            let (header, rule) = match d.header {
                Some(header) => (header, "as data.header says"),
                None => {
                    let rest: Vec<&[Vec<u8>]> = records[1..].iter().map(|r| &r.values[..]).collect();
                    match first_record(&first.values, &rest) {
                        First::Header(why) => (true, why),
                        First::Row(why) => (false, why),
                        First::Unclear => (false, UNCLEAR),
                    }
                }
            };
            source.format.header = Some(header);
            let names = match header {
                true => names_of(&first.values, None),
                false => (1..=first.values.len()).map(|i| format!("c{i}")).collect(),
            };
            (names, (header, rule), vec![])
        }
        Format::Sparse { .. } => {
            return Err(fail(format!(
                "is {}; its schema is written by hand: columns are named by index, field or position (docs/data.md, libsvm)",
                shape.describe()
            )));
        }
        #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
        Format::Parquet => {
            let file = super::columnar::Columnar::parquet(&source.places[0], |_| true)?;
            let (names, lists) = usable(file, &mut odd);
            (names, (true, "the file names its columns"), lists)
        }
        #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
        Format::Arrow { stream } => {
            let file = super::columnar::Columnar::arrow(&source.places[0], *stream)?;
            let (names, lists) = usable(file, &mut odd);
            (names, (true, "the file names its columns"), lists)
        }
        #[cfg(not(all(feature = "formats", not(target_arch = "wasm32"))))]
        _ => return Err(fail("is columnar, which this build does not read".into())),
    };
    let mut columns: Vec<ColumnSurvey> = names
        .iter()
        .map(|n| ColumnSurvey {
            name: n.clone(),
            shortest: usize::MAX,
            files: source.places.len() as u64,
            ..Default::default()
        })
        .collect();
    let mut places = std::collections::HashMap::new();
    for (k, name) in names.iter().enumerate() {
        if let Some(i) = places.insert(name, k) {
            let places = format!("as number {} and {}", i + 1, k + 1);
            return Err(fail(format!(
                "column {name:?} stands twice in the header, {places}; rename one, or say that the file has no header: \
                 --set data.header=no"
            )));
        }
    }
    let schema = all_text(&names, &lists);
    for (column, list) in columns.iter_mut().zip(&lists) {
        column.lists = *list;
    }
    let mut reader = source.open(&schema)?;
    let most = if most == 0 { u64::MAX } else { most };
    let (mut rows, mut complete) = (0, false);
    let width = names.len();
    while rows < most {
        let Some(chunks) = reader.next_chunks(|rows| rows)? else {
            complete = true;
            break;
        };
        for raw in &chunks {
            let taken = (raw.len() as u64).min(most - rows);
            rows += taken;
            for (j, column) in columns.iter_mut().enumerate() {
                for cell in (0..taken as usize).map(|r| r * width + j) {
                    if column.lists {
                        column.push_list(raw.list(cell));
                    } else {
                        column.push(raw.field(cell));
                    }
                }
            }
        }
    }
    let skipped = reader.skipped().clone();
    let label = match label {
        Some(name) if !names.iter().any(|n| n == name) => {
            return Err(fail(format!("has no column {name:?}; it has {}", super::plan::listed(&names))));
        }
        Some(name) => Some(name.to_string()),
        None => guess_label(&columns),
    };
    // Criteo's columns have names, though not in the file
    let named = header || matches!(&shape, Format::Delimited(d) if d.criteo);
    for column in &mut columns {
        column.guess(named);
        column.find_long_cells();
    }
    columns.extend(odd.into_iter().map(|(name, kind)| ColumnSurvey {
        name,
        kind: "ignore",
        rows,
        warnings: vec![format!("holds {kind}, of which no column can be made")],
        ..Default::default()
    }));
    let mut survey = Survey {
        format: shape.describe(),
        header,
        header_rule: rule.into(),
        trim: source.format.trim,
        rows,
        skipped: skipped.skipped,
        problems: skipped.first,
        complete,
        label_rate: None,
        columns,
        shape,
        options: source.format.clone(),
    };
    if let Some(label) = label {
        survey.compare_with_label(&source, &schema, &label, rows)?;
    }
    Ok(survey)
}

/// Names of the columns that can be used, and whether they hold lists; the others, with what they hold, go to `odd`.
#[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
fn usable(file: super::columnar::Columnar, odd: &mut Vec<(String, String)>) -> (Vec<String>, Vec<bool>) {
    let (mut names, mut lists) = (vec![], vec![]);
    for ((name, list), kind) in file.names.into_iter().zip(file.lists).zip(file.odd) {
        match kind {
            Some(kind) => odd.push((name, kind)),
            None => {
                names.push(name);
                lists.push(list);
            }
        }
    }
    (names, lists)
}

/// What is said where names could not be told from a row.
const UNCLEAR: &str = "nothing tells names from a row; where the first row has names: --set data.header=yes";

/// Whether every field but the first of a line begins with a blank: what stands between fields is more than the delimiter.
fn blank_after_delimiters(records: &[super::delimited::Record], delimiter: u8) -> bool {
    // names may stand without
    let fields = || records.iter().skip(1).flat_map(|r| r.values.iter().skip(1));
    !matches!(delimiter, b'\t' | b' ')
        && records.len() > 1
        && fields().next().is_some()
        && fields().all(|v| v.is_empty() || v.starts_with(b" "))
        && fields().any(|v| !v.is_empty())
}

/// Whether a text is a number but for commas: one in front of decimals, or one every three digits.
fn has_number_commas(value: &[u8]) -> bool {
    let digits = value.strip_prefix(b"-").unwrap_or(value);
    let groups: Vec<&[u8]> = digits.split(|&b| b == b',').collect();
    groups.len() > 1
        && groups.iter().all(|g| !g.is_empty() && g.iter().all(u8::is_ascii_digit))
        && (groups.len() == 2 || groups[1..].iter().all(|g| g.len() == 3))
}

const ENCODING: Encoding = Encoding::Vocabulary { min_count: 1, max_size: None };

/// A schema in which every column is text and none the label.
fn all_text(names: &[String], lists: &[bool]) -> Schema {
    let list = |i: usize| {
        let options = ListOptions { separator: '|', pooling: Pooling::Mean, max_length: 0 };
        lists.get(i).copied().unwrap_or(false).then_some(options)
    };
    let column = |(i, n)| CategoricalColumn { list: list(i), ..CategoricalColumn::single(n, ENCODING) };
    Schema {
        categorical: names.iter().enumerate().map(column).collect(),
        label: super::schema::LabelColumn { name: "(no label)".into(), positive: None },
        file: names.to_vec(),
        ..Schema::default()
    }
}

impl ColumnSurvey {
    fn push_list<'a>(&mut self, items: impl ExactSizeIterator<Item = &'a [u8]>) {
        let (rows, missing) = (self.rows + 1, self.missing + u64::from(items.len() == 0));
        self.lengths.push(items.len() as u32);
        items.for_each(|item| self.push(item));
        (self.rows, self.missing) = (rows, missing);
    }

    fn push(&mut self, value: &[u8]) {
        self.rows += 1;
        if value.is_empty() {
            self.missing += 1;
            return;
        }
        self.longest = self.longest.max(value.len());
        self.shortest = self.shortest.min(value.len());
        let number = parse_number(value).or_else(|| spaced_number(value));
        self.count_rows(number);
        if let Some(v) = number {
            self.numbers += 1;
            self.whole += u64::from(v.fract() == 0.0 && !value.contains(&b'.'));
            self.integral += u64::from(v.fract() == 0.0);
            let range = self.range.get_or_insert([v, v]);
            *range = [range[0].min(v), range[1].max(v)];
        } else if time_of(value).is_some() {
            self.dates += 1;
        }
        self.commas += u64::from(number.is_none() && has_number_commas(value));
        let separators = ['|', ';', ','];
        if number.is_none()
            && let Some(s) = separators.into_iter().find(|s| value.contains(&(*s as u8)))
        {
            self.separated += u64::from(self.separator.is_none_or(|known| known == s));
            let s = *self.separator.get_or_insert(s);
            let values = value.iter().filter(|b| **b == s as u8).count() + 1;
            self.lengths.push(values as u32);
        }
        if let Some(i) = self.values.get(value) {
            self.counts[i as usize] = self.counts[i as usize].saturating_add(1);
        } else if self.values.len() < MOST_DISTINCT {
            self.values.intern(value);
            self.counts.push(1);
            self.distinct = self.values.len();
            if self.examples.len() < 4 {
                self.examples.push(super::error::quoted(value).trim_matches('"').to_string());
            }
        }
    }
}

impl ColumnSurvey {
    /// Follows a count of the rows: each one more than the one before, or from the first on anew.
    fn count_rows(&mut self, number: Option<f64>) {
        // beyond 2^53 a float has no next whole number
        let Some(v) = number.filter(|v| v.fract() == 0.0 && v.abs() < 9e15) else {
            self.restarts = None;
            return;
        };
        match (self.count, &mut self.restarts) {
            (None, _) if self.rows == 1 => (self.count, self.restarts) = (Some([v, v]), Some(0)),
            (Some([first, last]), Some(_)) if v == last + 1.0 => self.count = Some([first, v]),
            (Some([first, _]), Some(n)) if v == first => (self.count, *n) = (Some([first, v]), *n + 1),
            _ => self.restarts = None,
        }
    }

    /// Of a list: whether some cells are far longer than the rest.
    fn find_long_cells(&mut self) {
        if self.kind == "list" {
            let single = (self.rows - self.missing).saturating_sub(self.lengths.rows());
            self.lengths.push_rows(1, single);
            self.warnings.extend(self.lengths.outliers());
        }
    }
}

impl Survey {
    /// Reads again to compare every column with the label.
    fn compare_with_label(
        &mut self,
        source: &Source,
        schema: &Schema,
        label: &str,
        most: u64,
    ) -> Result<(), DataError> {
        let Some(at) = self.columns.iter().position(|c| c.name == label) else { return Ok(()) };
        let width = schema.categorical.len();
        let mut equal = vec![true; width];
        let (mut rows, mut positives) = (0u64, 0u64);
        let mut reader = source.open(schema)?;
        while rows < most
            && let Some(chunks) = reader.next_chunks(|rows| rows)?
        {
            for raw in &chunks {
                for r in 0..raw.len() {
                    let y = raw.field(r * width + at);
                    positives += u64::from(&*plain_label(y) == b"1");
                    for (j, e) in equal.iter_mut().enumerate() {
                        *e = *e && !self.columns[j].lists && raw.field(r * width + j) == y;
                    }
                }
                rows += raw.len() as u64;
            }
        }
        for (j, column) in self.columns.iter_mut().enumerate() {
            if j != at && equal[j] {
                column.warnings.push("equals the label in every row: it would be the answer".into());
                column.kind = "ignore";
            }
        }
        let column = &mut self.columns[at];
        column.kind = "label";
        column.warnings.clear();
        let binary =
            column.missing == 0 && (0..column.values.len()).all(|i| is_label(column.values.value(i)));
        if binary {
            self.label_rate = Some(positives as f64 / rows.max(1) as f64);
        } else {
            column.warnings.push("not 0 and 1: say which values are positive".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::format::FormatOptions;
    use crate::data::input::Place;

    fn of(text: &str) -> Survey {
        let source = Source::new(
            vec![Place::Bytes("x.csv".into(), text.as_bytes().into())],
            FormatOptions::default(),
            ReadOptions::default(),
        );
        survey(&source, 0, None).unwrap()
    }

    #[test]
    fn kinds_are_guessed_with_warnings() {
        let mut text = String::from("row_id,click,age,price,site,genres,same,copy,day,note\n");
        for i in 0..300 {
            let site = ["a", "b", "c"][i % 3];
            let genres = ["x|y", "y", "x|z|y"][i % 3];
            let y = usize::from(i % 4 == 0);
            text += &format!(
                "{},{y},{},{}.5,{site},{genres},7,{y},2024-01-{:02},\"text, no {i}\"\n",
                1000 + i,
                i % 60,
                i,
                i % 28 + 1
            );
        }
        let s = of(&text);
        let kinds: Vec<&str> = s.columns.iter().map(|c| c.kind).collect();
        assert_eq!(
            kinds,
            [
                "ignore",
                "label",
                "numeric",
                "numeric",
                "categorical",
                "list",
                "ignore",
                "ignore",
                "ignore",
                "list"
            ]
        );
        assert!(s.header && s.complete && s.rows == 300 && (s.label_rate.unwrap() - 0.25).abs() < 1e-9);
        assert!(
            s.columns[7].warnings[0].contains("equals the label")
                && s.columns[6].warnings[0].contains("same value")
        );
        let toml = s.to_toml("x.csv");
        let config = crate::model::config::Config::from_text("s.toml", &toml, &[]).unwrap();
        let schema = crate::train::schema::schema(&config.data).unwrap();
        assert_eq!(
            (schema.label.name.as_str(), schema.numeric.len(), schema.categorical.len()),
            ("click", 2, 3)
        );
    }

    #[test]
    fn files_without_a_header_and_odd_labels() {
        let text: String = (0..200)
            .map(|i| format!("{},{},{}\n", i % 5 + 1, i % 17 + 100_000, ["u", "NA", "3"][i % 3]))
            .collect();
        let source = Source::new(
            vec![Place::Bytes("x".into(), text.as_bytes().into())],
            FormatOptions::default(),
            ReadOptions::default(),
        );
        let s = survey(&source, 0, Some("c1")).unwrap();
        assert!(!s.header);
        let toml = s.to_toml("x");
        assert!(toml.contains("positive = \">= 3\"") && toml.contains("look like ids"), "{toml}");
        assert!(survey(&source, 0, Some("nope")).unwrap_err().to_string().contains("has no column \"nope\""));
    }
}
