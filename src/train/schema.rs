//! The schema and the file format that a configuration asks for.

use crate::data::DataError;
use crate::data::format::{FormatName, FormatOptions};
use crate::data::label::LabelRule;
use crate::data::schema::{
    CategoricalColumn, Encoding, LabelColumn, ListOptions, NumericColumn, Pooling, Schema, Transform,
};
use crate::model::config::{self, ColumnConfig, ColumnKind, DataConfig, Format, Header};

fn transform(n: config::Numeric, standardize_log: bool) -> Transform {
    match n {
        config::Numeric::Log if standardize_log => Transform::LOG_STANDARDIZE,
        config::Numeric::Log => Transform::Log,
        config::Numeric::Standardize => Transform::STANDARDIZE,
        config::Numeric::None => Transform::None,
    }
}

fn vocabulary(min_count: usize, max_size: usize) -> Encoding {
    Encoding::Vocabulary { min_count: min_count as _, max_size: (max_size > 0).then_some(max_size as _) }
}

/// The schema of a configuration; that of Criteo where it lists no columns.
pub fn schema(d: &DataConfig) -> Result<Schema, DataError> {
    let common = match d.ids {
        config::Encoding::Vocabulary => vocabulary(d.min_count, d.max_size),
        config::Encoding::Hash => Encoding::Hash { buckets: d.buckets as _ },
    };
    if d.columns.is_empty() {
        return Ok(Schema::criteo(transform(d.numeric, d.standardize_log), d.indicators, common));
    }
    let mut s = Schema::default();
    for c in &d.columns {
        // what has a `from` is a second use of a column that is listed already, or stands in a header
        if c.from.is_none() {
            s.file.push(c.name.clone());
        }
        let source = || c.from.clone().unwrap_or_else(|| c.name.clone());
        match c.kind {
            ColumnKind::Label => s.label = label(c)?,
            ColumnKind::Weight => s.weight = Some(source()),
            ColumnKind::Group => s.group = Some(source()),
            ColumnKind::Ignore => {}
            ColumnKind::Numeric => s.numeric.push(NumericColumn {
                name: c.name.clone(),
                from: c.from.clone(),
                transform: transform(
                    c.transform.unwrap_or(d.numeric),
                    c.standardize.unwrap_or(d.standardize_log),
                ),
                indicator: c.indicator.unwrap_or(d.indicators),
                na: c.na.clone(),
            }),
            ColumnKind::Categorical | ColumnKind::List => s.categorical.push(categorical(c, common)),
        }
    }
    s.validate()?;
    Ok(s)
}

fn label(c: &ColumnConfig) -> Result<LabelColumn, DataError> {
    let positive = c.positive.as_deref().map(LabelRule::parse).transpose();
    let positive = positive.map_err(|problem| DataError::Schema { column: c.name.clone(), problem })?;
    Ok(LabelColumn { name: c.from.clone().unwrap_or_else(|| c.name.clone()), positive })
}

fn categorical(c: &ColumnConfig, common: Encoding) -> CategoricalColumn {
    let encoding = match (c.vocabulary, c.hash) {
        (Some(v), _) => vocabulary(v.min_count, v.max_size),
        (_, Some(h)) => Encoding::Hash { buckets: h.buckets as _ },
        _ => common,
    };
    let list = (c.kind == ColumnKind::List).then(|| ListOptions {
        separator: c.separator.as_deref().and_then(|s| s.chars().next()).unwrap_or('|'),
        pooling: match c.pooling {
            Some(config::Pooling::Sum) => Pooling::Sum,
            _ => Pooling::Mean,
        },
        max_length: c.max_length.unwrap_or(0) as _,
    });
    CategoricalColumn {
        name: c.name.clone(),
        from: c.from.clone(),
        encoding,
        list,
        share: c.share.clone(),
        width: c.width.map(|w| w as _),
        form: None,
        na: c.na.clone(),
    }
}

/// What a configuration says about files.
pub fn format(d: &DataConfig) -> FormatOptions {
    let byte = |text: &str| text.bytes().next();
    FormatOptions {
        format: match d.format {
            Format::Auto => FormatName::Auto,
            Format::Criteo => FormatName::Criteo,
            Format::Csv => FormatName::Csv,
            Format::Tsv => FormatName::Tsv,
            Format::Libsvm => FormatName::Libsvm,
            Format::Libffm => FormatName::Libffm,
            Format::Parquet => FormatName::Parquet,
            Format::Arrow => FormatName::Arrow,
        },
        delimiter: byte(&d.delimiter),
        quote: (d.quote != "auto").then(|| byte(&d.quote)),
        header: match d.header {
            Header::Auto => None,
            Header::Yes => Some(true),
            Header::No => Some(false),
        },
        comment: d.comment.clone(),
        na: d.na.clone(),
        trim: d.trim,
        encoding: if d.encoding == "utf-8" { String::new() } else { d.encoding.clone() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Config;

    #[test]
    fn logarithms_are_standardised_unless_they_are_not_to_be() {
        let transforms = |text: &str, sets: &[&str]| -> Vec<Transform> {
            let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
            let config = Config::from_text("", text, &sets).unwrap();
            schema(&config.data).unwrap().numeric.into_iter().map(|c| c.transform).collect()
        };
        assert!(transforms("", &[]).iter().all(|t| *t == Transform::LOG_STANDARDIZE));
        assert!(transforms("", &["data.standardize_log=false"]).iter().all(|t| *t == Transform::Log));
        let columns = "[data]\ncolumns = [{ name = 'y', kind = 'label' }, { name = 'a', kind = 'numeric' },
            { name = 'b', kind = 'numeric', transform = 'log', standardize = false },
            { name = 'c', kind = 'numeric', transform = 'standardize' }]";
        let want = [Transform::LOG_STANDARDIZE, Transform::Log, Transform::STANDARDIZE];
        assert_eq!(transforms(columns, &[]), want);
        let plain = [Transform::Log, Transform::Log, Transform::STANDARDIZE];
        assert_eq!(transforms(columns, &["data.standardize_log=false"]), plain);
    }
}
