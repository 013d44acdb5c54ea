//! The embedding tables of a configuration, for [`super::planner`].

use std::collections::HashSet;

use super::placement::Table;
use crate::data::FittedEncoder;
use crate::data::rows::Rows;
use crate::data::schema::{Encoding, Schema};
use crate::model::config::{Config, EmbeddingOptimizer};

/// The tables of a schema's categorical columns, in the order of the columns that own them. `rows` has one number for
/// each categorical column, of which the owners' count. A list is taken to be as long as it may be, and all ids to be
/// distinct: [`measure`] knows better.
pub fn tables(schema: &Schema, rows: &[u64], cfg: &Config) -> Vec<Table> {
    let owners = schema.owners();
    let (row_state, value_state) = match cfg.train.embedding {
        EmbeddingOptimizer::Adagrad => (1, 0),
        EmbeddingOptimizer::Adam => (0, 2),
    };
    let table = |owner: usize| {
        let c = &schema.categorical[owner];
        let users = schema.categorical.iter().zip(&owners).filter(|(_, o)| **o == owner);
        let lookups = users.map(|(u, _)| u.list.as_ref().map_or(1, |l| l.max_length.max(1)));
        Table {
            name: c.name.clone(),
            rows: rows[owner],
            width: c.width.unwrap_or(cfg.model.width as u32),
            lookups: lookups.map(f64::from).sum(),
            unique: 1.0,
            ranked: matches!(c.encoding, Encoding::Vocabulary { .. }),
            row_state,
            value_state,
        }
    };
    (0..owners.len()).filter(|&j| owners[j] == j).map(table).collect()
}

/// The tables of fitted vocabularies.
pub fn of_encoder(encoder: &FittedEncoder, cfg: &Config) -> Vec<Table> {
    let rows: Vec<u64> = encoder.table_rows().into_iter().map(u64::from).collect();
    tables(&encoder.schema, &rows, cfg)
}

/// Replaces what [`tables`] assumes by what rows of the schema show: ids an example, and how many of a batch's are
/// distinct. The rows are dealt to batches one by one, as shuffled ones would be. Fewer rows than a batch tell the
/// first only.
pub fn measure(tables: &mut [Table], schema: &Schema, rows: &Rows, batch: usize) {
    if rows.is_empty() {
        return;
    }
    let owners = schema.owners();
    let (mut singles, mut lists) = (0, 0);
    let places: Vec<usize> = schema
        .categorical
        .iter()
        .map(|c| {
            let count = if c.list.is_some() { &mut lists } else { &mut singles };
            *count += 1;
            *count - 1
        })
        .collect();
    let batches = rows.len() / batch.max(1);
    let own = (0..owners.len()).filter(|&j| owners[j] == j);
    for (table, owner) in tables.iter_mut().zip(own) {
        let users: Vec<usize> = (0..owners.len()).filter(|&j| owners[j] == owner).collect();
        let each = |row: usize, f: &mut dyn FnMut(u32)| {
            for &j in &users {
                match schema.categorical[j].list {
                    None => f(rows.ids[row * rows.columns + places[j]]),
                    Some(_) => rows.lists[places[j]].row(row).iter().for_each(|&id| f(id)),
                }
            }
        };
        let mut ids = 0u64;
        (0..rows.len()).for_each(|row| each(row, &mut |_| ids += 1));
        table.lookups = ids as f64 / rows.len() as f64;
        let (mut distinct, mut drawn) = (0usize, 0u64);
        for b in 0..batches {
            let mut seen = HashSet::new();
            for row in (b..batches * batch).step_by(batches) {
                each(row, &mut |id| {
                    drawn += 1;
                    seen.insert(id);
                });
            }
            distinct += seen.len();
        }
        if drawn > 0 {
            table.unique = distinct as f64 / drawn as f64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::rows::ListIds;
    use crate::data::schema::{CategoricalColumn, ListOptions, Pooling};

    /// A list, a column that shares its table, and a hashed one between them.
    fn schema() -> Schema {
        let vocabulary = Encoding::Vocabulary { min_count: 1, max_size: Some(100) };
        let single = CategoricalColumn::single;
        let list = ListOptions { separator: '|', pooling: Pooling::Mean, max_length: 5 };
        let columns = vec![
            CategoricalColumn { list: Some(list), ..single("history", vocabulary) },
            CategoricalColumn { width: Some(4), ..single("user", Encoding::Hash { buckets: 50 }) },
            CategoricalColumn { share: Some("history".into()), ..single("item", vocabulary) },
        ];
        Schema { categorical: columns, ..Schema::default() }
    }

    #[test]
    fn shared_tables_are_one_and_usage_is_measured() {
        let text = "[model]\nwidth = 8\n[train]\nembedding = \"adam\"";
        let cfg = Config::from_text("c.toml", text, &[]).expect("valid");
        let schema = schema();
        schema.validate().expect("valid");
        let mut t = tables(&schema, &[102, 52, 102], &cfg);
        let all = |t: &[Table]| {
            t.iter().map(|t| (t.name.clone(), t.rows, t.width, t.lookups, t.ranked)).collect::<Vec<_>>()
        };
        assert_eq!(all(&t), [("history".into(), 102, 8, 6.0, true), ("user".into(), 52, 4, 1.0, false)]);
        assert_eq!((t[0].row_state, t[0].value_state, t[0].bytes()), (0, 2, 102 * 8 * 3 * 4));
        // 4 rows in 2 batches: rows 0 and 2, 1 and 3; history and item look up in one table
        let rows = Rows {
            ids: [[7, 2], [7, 3], [8, 2], [7, 9]].concat(),
            lists: vec![ListIds { ends: vec![2, 2, 3, 6], ids: vec![2, 2, 2, 3, 4, 5] }],
            labels: vec![0, 1, 0, 1],
            ..Rows::new(0, 2)
        };
        measure(&mut t, &schema, &rows, 2);
        assert_eq!((t[0].lookups, t[1].lookups), (10.0 / 4.0, 1.0));
        // {2} of 5 ids, {3, 4, 5, 9} of 5; {7, 8} of 2, {7} of 2
        assert_eq!((t[0].unique, t[1].unique), (0.5, 0.75));
        // too few for a batch
        let mut t = tables(&schema, &[102, 52, 102], &cfg);
        measure(&mut t, &schema, &rows, 5);
        assert_eq!((t[0].lookups, t[0].unique), (2.5, 1.0));
    }
}
