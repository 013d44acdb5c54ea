//! Statistics, counts and forms of the training rows' columns: what an encoder is made of.

use crate::par::*;

use super::encoder::FittedEncoder;
use super::error::DataError;
use super::lengths::Lengths;
use super::profile::{CategoricalProfile, Numbers, Profile};
use super::rows::RawRows;
use super::schema::{CategoricalColumn, Encoding, Schema};
use super::value::FormFinder;
use super::vocab::{ColumnEncoder, Counter, Interner};

/// Collects statistics and counts over the training rows.
#[derive(Debug)]
pub struct Fitter {
    schema: Schema,
    numbers: Vec<Numbers>,
    counters: Vec<Counter>,
    /// Of each table what its values are like.
    forms: Vec<FormFinder>,
    /// Columns of the files whose values are texts by type.
    texts: Vec<String>,
    /// Longest list of each categorical column.
    longest: Vec<u32>,
    /// Rows without a value, of each categorical column.
    missing: Vec<u64>,
    /// How long those of the multi-valued ones are.
    lengths: Vec<Lengths>,
    rows: u64,
    positives: u64,
    weights: [f64; 2],
}

impl Fitter {
    /// A fitter without rows; the schema is checked.
    pub fn new(schema: &Schema) -> Result<Fitter, DataError> {
        schema.validate()?;
        Ok(Fitter {
            numbers: vec![Numbers::default(); schema.numeric.len()],
            counters: vec![Counter::default(); schema.categorical.len()],
            forms: vec![FormFinder::default(); schema.categorical.len()],
            texts: vec![],
            longest: vec![0; schema.categorical.len()],
            missing: vec![0; schema.categorical.len()],
            lengths: vec![Lengths::default(); schema.lists()],
            schema: schema.clone(),
            rows: 0,
            positives: 0,
            weights: [0.0; 2],
        })
    }

    /// Counts rows. Columns are counted in parallel: no tables to merge, same result on any machine.
    pub fn push(&mut self, raw: &RawRows) -> Result<(), DataError> {
        let (n, c) = (self.schema.numeric.len(), self.schema.categorical.len());
        self.rows += raw.len() as u64;
        self.positives += raw.labels.iter().filter(|&&l| l == 1).count() as u64;
        for (&w, &label) in raw.weights.iter().zip(&raw.labels) {
            self.weights[0] += f64::from(w);
            self.weights[1] += if label == 1 { f64::from(w) } else { 0.0 };
        }
        let numeric = &self.schema.numeric;
        self.numbers.par_iter_mut().enumerate().for_each(|(k, numbers)| {
            numbers.push(&numeric[k].transform, raw.numeric.iter().skip(k).step_by(n).copied());
        });
        for row in raw.fields.chunks_exact(c.max(1)) {
            for (missing, (start, end)) in self.missing.iter_mut().zip(row) {
                *missing += u64::from(start == end);
            }
        }
        let owners = self.schema.owners();
        let mut lists = self.lengths.iter_mut();
        for (j, (longest, column)) in self.longest.iter_mut().zip(&self.schema.categorical).enumerate() {
            if column.list.is_some() {
                let Some(lengths) = lists.next() else { continue };
                for row in 0..raw.len() {
                    let length = raw.list(row * c + j).len() as u32;
                    *longest = length.max(*longest);
                    lengths.push(length);
                }
            }
        }
        let columns = &self.schema.categorical;
        let tables = self.counters.par_iter_mut().zip(self.forms.par_iter_mut()).enumerate();
        let counted = tables.map(|(owner, (counter, form))| {
            if owners[owner] != owner {
                return Ok(());
            }
            if matches!(columns[owner].encoding, Encoding::Hash { .. }) {
                for j in (0..c).filter(|&j| owners[j] == owner) {
                    for row in 0..if form.is_open() { raw.len() } else { 0 } {
                        match &columns[j].list {
                            Some(_) => raw.list(row * c + j).for_each(|value| form.push(value)),
                            None if raw.field(row * c + j).is_empty() => {}
                            None => form.push(raw.field(row * c + j)),
                        }
                    }
                }
                return Ok(());
            }
            // Whoever uses the table counts towards its vocabulary.
            for j in (0..c).filter(|&j| owners[j] == owner) {
                for row in 0..raw.len() {
                    let known = if columns[j].list.is_some() {
                        raw.list(row * c + j).all(|value| counter.count(value))
                    } else {
                        let value = raw.field(row * c + j);
                        value.is_empty() || counter.count(value)
                    };
                    if !known {
                        return Err(DataError::TooMany {
                            what: format!("distinct values of column {}", columns[j].name),
                            count: counter.distinct() as u64 + 1,
                            limit: counter.distinct() as u64,
                            remedy: "use the hash encoding for it",
                        });
                    }
                }
            }
            Ok(())
        });
        counted.collect()
    }

    /// Says which columns of the files are texts by type: what they say stays.
    pub fn texts(&mut self, names: &[String]) {
        self.texts = names.to_vec();
    }

    /// Finds the form of each table's values, and counts them in it.
    fn set_forms(&mut self) {
        let owners = self.schema.owners();
        let source = |c: &CategoricalColumn| c.from.clone().unwrap_or_else(|| c.name.clone());
        for (counter, finder) in self.counters.iter().zip(&mut self.forms) {
            counter.find_form(finder);
        }
        let texts: Vec<bool> =
            self.schema.categorical.iter().map(|c| self.texts.contains(&source(c))).collect();
        for (j, &owner) in owners.iter().enumerate() {
            let text = owners.iter().zip(&texts).any(|(o, text)| *o == owner && *text);
            let finder = &self.forms[owner];
            self.schema.categorical[j].form = Some(if text { finder.form_of_texts() } else { finder.form() });
        }
        for (counter, column) in self.counters.iter_mut().zip(&self.schema.categorical) {
            *counter = std::mem::take(counter).in_form(column.form.unwrap_or_default());
        }
    }

    /// The fitted encoder.
    pub fn finish(mut self) -> Result<FittedEncoder, DataError> {
        self.set_forms();
        let mut schema = self.schema;
        let numeric = schema.numeric.iter_mut().zip(self.numbers);
        let numeric = numeric.map(|(column, numbers)| numbers.finish(&mut column.transform)).collect();
        for (column, longest) in schema.categorical.iter_mut().zip(self.longest) {
            if let Some(list) = &mut column.list
                && list.max_length == 0
            {
                list.max_length = longest.max(1);
            }
        }
        let owned =
            self.counters.iter().zip(&schema.categorical).map(|(counter, column)| match column.encoding {
                Encoding::Vocabulary { min_count, max_size } => Some(counter.coverage(min_count, max_size)),
                Encoding::Hash { .. } => None,
            });
        let owned: Vec<_> = owned.collect();
        let categorical = schema.owners().into_iter().zip(self.missing);
        let categorical = categorical
            .map(|(owner, missing)| CategoricalProfile { missing, coverage: owned[owner] })
            .collect();
        let profile = Some(Profile { numeric, categorical });
        let columns = self.counters.into_iter().zip(&schema.categorical).map(|(counter, column)| {
            let values = match column.encoding {
                Encoding::Vocabulary { min_count, max_size } => counter.finish(min_count, max_size),
                Encoding::Hash { .. } => Interner::default(),
            };
            ColumnEncoder::new(column, values)
        });
        let columns = columns.collect::<Result<Vec<_>, _>>()?;
        let weights = schema.weight.is_some().then_some(self.weights);
        Ok(FittedEncoder {
            columns,
            rows: self.rows,
            positives: self.positives,
            weights,
            lengths: self.lengths,
            schema,
            profile,
        })
    }
}
