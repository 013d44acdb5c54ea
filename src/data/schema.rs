//! Which columns a data set has and how each becomes a number or an id.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::error::DataError;
use super::label::LabelRule;
use super::value::Form;
use super::vocab::FIRST_VALUE;

/// How a numeric value is transformed; a missing value is 0 after it (math.md, section 1).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Transform {
    /// ln(1 + max(v, 0)).
    Log,
    /// (ln(1 + max(v, 0)) − mean)/std, both of the logarithms of the training rows; a constant column gives zeros.
    #[serde(rename = "log_standardize")]
    LogStandardize {
        /// Mean of the logarithms of the present training values; 0 before fitting.
        #[serde(default)]
        mean: f64,
        /// Their population standard deviation; 1 before fitting.
        #[serde(default = "one")]
        std: f64,
    },
    /// (v − mean)/std, both from the training rows; a constant column gives zeros.
    Standardize {
        /// Mean of the present training values; 0 before fitting.
        #[serde(default)]
        mean: f64,
        /// Their population standard deviation; 1 before fitting.
        #[serde(default = "one")]
        std: f64,
    },
    /// v itself.
    None,
}

fn one() -> f64 {
    1.0
}

impl Transform {
    /// `standardize` before fitting.
    pub const STANDARDIZE: Transform = Transform::Standardize { mean: 0.0, std: 1.0 };

    /// A standardised `log` before fitting.
    pub const LOG_STANDARDIZE: Transform = Transform::LogStandardize { mean: 0.0, std: 1.0 };

    /// Of a transform by the logarithm what is taken from it, and what the rest is multiplied by.
    pub(crate) fn of_log(&self) -> Option<(f64, f64)> {
        match *self {
            Transform::Log => Some((0.0, 1.0)),
            Transform::LogStandardize { mean, std } => {
                // less is a constant column's, and features stay within f32
                Some((mean, if std > 1e-30 { 1.0 / std } else { 0.0 }))
            }
            _ => None,
        }
    }

    /// Its word in a configuration.
    fn word(&self) -> &'static str {
        match self {
            Transform::Log | Transform::LogStandardize { .. } => "log",
            Transform::Standardize { .. } => "standardize",
            Transform::None => "none",
        }
    }

    /// The feature of a value, NaN standing for missing. Finite for every finite value.
    pub fn apply(&self, value: f64) -> f32 {
        if value.is_nan() {
            return 0.0;
        }
        if let Some(affine) = self.of_log() {
            return as_feature((value.max(0.0).ln_1p() - affine.0) * affine.1);
        }
        let x = match *self {
            Transform::Standardize { std: 0.0, .. } => 0.0,
            Transform::Standardize { mean, std } => (value - mean) / std,
            _ => value,
        };
        as_feature(x)
    }
}

#[inline(always)]
fn as_feature(x: f64) -> f32 {
    x.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32
}

/// One numeric column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumericColumn {
    /// Name, as errors give it.
    pub name: String,
    /// Column of the file, where its name is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// How its values are transformed.
    pub transform: Transform,
    /// Whether a 0/1 "is missing" feature follows the transformed columns.
    #[serde(default)]
    pub indicator: bool,
    /// Further texts that mean "missing" in this column.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub na: Vec<String>,
}

impl NumericColumn {
    /// A column of the file.
    pub fn new(name: impl Into<String>, transform: Transform, indicator: bool) -> NumericColumn {
        NumericColumn { name: name.into(), from: None, transform, indicator, na: vec![] }
    }
}

/// How a categorical value becomes an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Encoding {
    /// Ids for the values of the training rows, everything else is out-of-vocabulary.
    Vocabulary {
        /// Values seen less often have no id of their own.
        #[serde(default = "one_count")]
        min_count: u64,
        /// At most this many values, the most frequent ones.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_size: Option<u32>,
    },
    /// 2 + xxh3_64(column name, NUL, value) mod buckets.
    Hash {
        /// Number of buckets.
        buckets: u32,
    },
}

fn one_count() -> u64 {
    1
}

/// How the embedding rows of a list become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// Their sum.
    Sum,
    /// Their mean.
    #[default]
    Mean,
}

/// What makes a categorical column multi-valued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListOptions {
    /// Between the values of a cell of text; of no meaning where cells are lists already (Parquet, Arrow).
    pub separator: char,
    /// How their rows become one; an empty list pools to zeros.
    #[serde(default)]
    pub pooling: Pooling,
    /// Values of a cell that count, the first ones; 0 before fitting: the longest cell of the training rows.
    #[serde(default)]
    pub max_length: u32,
}

/// One categorical column: one slot of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CategoricalColumn {
    /// Name, as errors give it and as the hash sees it.
    pub name: String,
    /// Column of the file, where its name is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// How its values become ids.
    pub encoding: Encoding,
    /// Present where a cell holds several values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list: Option<ListOptions>,
    /// The column whose embedding table (and ids) it uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<String>,
    /// Width of its embedding rows where it is not the model's; a learned map brings them to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<u32>,
    /// What its training values, and those of the columns that share its table, are like; absent before fitting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub form: Option<Form>,
    /// Further texts that mean "missing" in this column.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub na: Vec<String>,
}

impl CategoricalColumn {
    /// A single-valued column with a table of its own.
    pub fn single(name: impl Into<String>, encoding: Encoding) -> CategoricalColumn {
        CategoricalColumn {
            name: name.into(),
            from: None,
            encoding,
            list: None,
            share: None,
            width: None,
            form: None,
            na: vec![],
        }
    }
}

/// The label column.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LabelColumn {
    /// Its name.
    pub name: String,
    /// Which values are positive; without it the file has 0 and 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub positive: Option<LabelRule>,
}

impl Default for LabelColumn {
    fn default() -> LabelColumn {
        LabelColumn { name: "label".into(), positive: None }
    }
}

/// The columns of a data set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schema {
    /// Numeric columns.
    pub numeric: Vec<NumericColumn>,
    /// Categorical columns, single- and multi-valued, in the order of the model's slots.
    pub categorical: Vec<CategoricalColumn>,
    /// The label.
    #[serde(default)]
    pub label: LabelColumn,
    /// Column of row weights, positive numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<String>,
    /// Column of the groups (users, sessions) that grouped metrics compare rows within.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Names of the columns of a file without a header, in its order; what no column above names is ignored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub file: Vec<String>,
}

/// Integer columns of a Criteo row.
pub const CRITEO_NUMERIC: usize = 13;
/// Categorical columns of a Criteo row.
pub const CRITEO_CATEGORICAL: usize = 26;

impl Schema {
    /// Criteo's I1..I13 and C1..C26, each kind with one treatment.
    pub fn criteo(transform: Transform, indicator: bool, encoding: Encoding) -> Schema {
        let numeric: Vec<NumericColumn> =
            (1..=CRITEO_NUMERIC).map(|i| NumericColumn::new(format!("I{i}"), transform, indicator)).collect();
        let categorical: Vec<CategoricalColumn> =
            (1..=CRITEO_CATEGORICAL).map(|i| CategoricalColumn::single(format!("C{i}"), encoding)).collect();
        let names = numeric.iter().map(|c| &c.name).chain(categorical.iter().map(|c| &c.name));
        let file = std::iter::once("label".to_string()).chain(names.cloned()).collect();
        Schema { numeric, categorical, file, ..Schema::default() }
    }

    /// Numeric features of a row: the transformed columns, then the indicators.
    pub fn features(&self) -> usize {
        self.numeric.len() + self.numeric.iter().filter(|c| c.indicator).count()
    }

    /// Single-valued categorical columns.
    pub fn singles(&self) -> usize {
        self.categorical.iter().filter(|c| c.list.is_none()).count()
    }

    /// Multi-valued categorical columns.
    pub fn lists(&self) -> usize {
        self.categorical.len() - self.singles()
    }

    /// For each categorical column the column that owns its table: itself, or the one that it shares.
    pub fn owners(&self) -> Vec<usize> {
        let find = |name: &str| self.categorical.iter().position(|c| c.name == name);
        let owner = |(j, c): (usize, &CategoricalColumn)| c.share.as_deref().and_then(find).unwrap_or(j);
        self.categorical.iter().enumerate().map(owner).collect()
    }

    /// Columns of the file that rows need besides the label, each once.
    pub fn needed(&self) -> Vec<&str> {
        let (mut names, mut seen): (Vec<&str>, HashSet<&str>) = (vec![], HashSet::new());
        let numeric = self.numeric.iter().map(|c| c.from.as_deref().unwrap_or(&c.name));
        let categorical = self.categorical.iter().map(|c| c.from.as_deref().unwrap_or(&c.name));
        let others = self.weight.as_deref().into_iter().chain(self.group.as_deref());
        for name in numeric.chain(categorical).chain(others) {
            if seen.insert(name) {
                names.push(name);
            }
        }
        names
    }

    /// The features of a row in output order; NaN stands for missing.
    pub fn transform_into(&self, values: &[f64], out: &mut Vec<f32>) {
        debug_assert_eq!(values.len(), self.numeric.len());
        out.extend(self.numeric.iter().zip(values).map(|(c, &v)| c.transform.apply(v)));
        let indicators = self.numeric.iter().zip(values).filter(|(c, _)| c.indicator);
        out.extend(indicators.map(|(_, v)| f32::from(u8::from(v.is_nan()))));
    }

    /// Whether the schema can be used; the error names the column.
    pub fn validate(&self) -> Result<(), DataError> {
        let fail = |column: &str, problem: String| {
            Err(DataError::Schema { column: column.escape_debug().to_string(), problem })
        };
        let mut seen = HashSet::new();
        let names = self.numeric.iter().map(|c| &c.name).chain(self.categorical.iter().map(|c| &c.name));
        for name in names.chain([&self.label.name]) {
            if name.is_empty() || name.chars().any(char::is_control) {
                return fail(
                    name,
                    "a name must have characters, and none of them a control character".into(),
                );
            }
            if !seen.insert(name) {
                return fail(
                    name,
                    "two columns have this name; rename one (`from` names its file column)".into(),
                );
            }
        }
        if self.numeric.is_empty() && self.categorical.is_empty() {
            return fail(
                &self.label.name,
                "there is no numeric, categorical or list column to learn from".into(),
            );
        }
        for c in &self.numeric {
            if let Transform::Standardize { mean, std } | Transform::LogStandardize { mean, std } =
                c.transform
                && !(mean.is_finite() && std.is_finite() && std >= 0.0)
            {
                return fail(&c.name, format!("mean {mean} and std {std} must be finite, std not negative"));
            }
        }
        for c in &self.categorical {
            match c.encoding {
                Encoding::Vocabulary { min_count: 0, .. } => {
                    return fail(&c.name, "min_count is 0, expected at least 1".into());
                }
                Encoding::Hash { buckets } if buckets == 0 || buckets > u32::MAX - 2 * FIRST_VALUE => {
                    return fail(&c.name, format!("{buckets} hash buckets, expected 1 to 4294967291"));
                }
                _ => {}
            }
            if let Some(0 | 8193..) = c.width {
                return fail(&c.name, "its width must be 1 to 8192".into());
            }
            if let Some(name) = &c.share {
                let Some(owner) = self.categorical.iter().find(|o| o.name == *name) else {
                    return fail(
                        &c.name,
                        format!("it shares the table of {name:?}, which is no categorical column"),
                    );
                };
                if owner.share.is_some() || owner.name == c.name {
                    return fail(
                        &c.name,
                        format!("{name:?} shares a table itself; name the column that owns it"),
                    );
                }
                if owner.width != c.width {
                    return fail(&c.name, format!("it shares the table of {name:?} but has another width"));
                }
            }
        }
        for (owner, c) in self.owners().iter().zip(&self.categorical) {
            let first =
                self.categorical.iter().zip(self.owners()).find(|(o, w)| w == owner && o.list.is_some());
            let pooling = |c: &CategoricalColumn| c.list.as_ref().map(|l| l.pooling);
            if let Some((first, _)) = first
                && c.list.is_some()
                && pooling(first) != pooling(c)
            {
                return fail(
                    &c.name,
                    format!("lists that share a table pool alike; {} pools otherwise", first.name),
                );
            }
        }
        Ok(())
    }

    /// The first difference from `other`, in words, leaving aside what was fitted: statistics, and whether logarithms
    /// are standardised, which runs of older versions were not told.
    pub fn difference(&self, other: &Schema) -> Option<String> {
        if self.numeric.len() != other.numeric.len() || self.categorical.len() != other.categorical.len() {
            return Some(format!(
                "{} numeric and {} categorical columns against {} and {}",
                self.numeric.len(),
                self.categorical.len(),
                other.numeric.len(),
                other.categorical.len()
            ));
        }
        for (a, b) in self.numeric.iter().zip(&other.numeric) {
            if a.name != b.name {
                return Some(format!("column {} against {}", a.name, b.name));
            }
            if a.transform.word() != b.transform.word() || a.indicator != b.indicator {
                return Some(format!("column {} has another transform or indicator", a.name));
            }
        }
        for (a, b) in self.categorical.iter().zip(&other.categorical) {
            if a.name != b.name {
                return Some(format!("column {} against {}", a.name, b.name));
            }
            if a.encoding != b.encoding {
                return Some(format!("column {} has another encoding", a.name));
            }
            let pooling = |c: &CategoricalColumn| c.list.as_ref().map(|l| l.pooling);
            if pooling(a) != pooling(b) || a.share != b.share || a.width != b.width {
                return Some(format!("column {} has another pooling, width or table", a.name));
            }
        }
        if self.label.positive != other.label.positive {
            return Some(format!("label {} has another rule for what is positive", self.label.name));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: Encoding = Encoding::Vocabulary { min_count: 1, max_size: None };

    #[test]
    fn transforms_follow_the_text() {
        assert_eq!(Transform::Log.apply(-3.0), 0.0);
        assert_eq!(Transform::Log.apply(1.0), 2.0_f32.ln());
        let s = Transform::Standardize { mean: 2.0, std: 4.0 };
        assert_eq!((s.apply(10.0), s.apply(f64::NAN)), (2.0, 0.0));
        assert_eq!(Transform::Standardize { mean: 2.0, std: 0.0 }.apply(2.0), 0.0);
        assert_eq!(Transform::None.apply(-7.0), -7.0);
        let log = Transform::LogStandardize { mean: 2.0_f64.ln(), std: 0.5 };
        assert_eq!((log.apply(1.0), log.apply(f64::NAN)), (0.0, 0.0));
        assert!((log.apply(-3.0) + 2.0 * 2.0_f32.ln()).abs() < 1e-6);
        for std in [0.0, 1e-310] {
            assert_eq!(Transform::LogStandardize { mean: 3.0, std }.apply(9.0), 0.0);
        }
        let tiny = Transform::Standardize { mean: 0.0, std: 1e-300 };
        assert!(tiny.apply(1e30).is_finite());
    }

    #[test]
    fn indicators_follow_all_transformed_columns() {
        let mut s = Schema::criteo(Transform::None, false, VOCAB);
        s.numeric.truncate(3);
        s.numeric[0].indicator = true;
        s.numeric[2].indicator = true;
        let mut out = Vec::new();
        s.transform_into(&[f64::NAN, 5.0, 6.0], &mut out);
        assert_eq!(out, [0.0, 5.0, 6.0, 1.0, 0.0]);
        assert_eq!(s.features(), 5);
    }

    #[test]
    fn validation_names_the_column() {
        let good = Schema::criteo(Transform::Log, true, VOCAB);
        assert!(good.validate().is_ok() && good.features() == 26);
        let mut s = good.clone();
        s.categorical[4].name = "I2".into();
        assert!(s.validate().unwrap_err().to_string().contains("column I2: two columns"));
        let mut s = good.clone();
        s.categorical[4].encoding = Encoding::Hash { buckets: 0 };
        assert!(s.validate().unwrap_err().to_string().starts_with("schema: column C5: 0 hash buckets"));
        let mut s = good.clone();
        s.categorical[0].encoding = Encoding::Vocabulary { min_count: 0, max_size: None };
        assert!(s.validate().is_err());
        assert_eq!(good.difference(&s).unwrap(), "column C1 has another encoding");
        let mut s = good.clone();
        s.numeric[0].name = "bad\tname".into();
        assert!(!s.validate().unwrap_err().to_string().contains('\t'));
    }

    #[test]
    fn serde_round_trip_and_unknown_keys() {
        let s = Schema::criteo(Transform::STANDARDIZE, true, Encoding::Hash { buckets: 1000 });
        let json = serde_json::to_string(&s).unwrap();
        assert_eq!(serde_json::from_str::<Schema>(&json).unwrap(), s);
        let log = |t: Transform| serde_json::to_string(&t).unwrap();
        // as older versions wrote it, and what they are to refuse rather than to misread
        assert_eq!(log(Transform::Log), r#"{"kind":"log"}"#);
        assert_eq!(log(Transform::LOG_STANDARDIZE), r#"{"kind":"log_standardize","mean":0.0,"std":1.0}"#);
        assert!(serde_json::from_str::<Schema>(&json.replacen("buckets", "bucket", 1)).is_err());
    }
}
