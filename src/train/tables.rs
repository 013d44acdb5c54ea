//! Which columns share a table buffer.

use crate::data::batch::{Bag, GroupLayout, PooledLayout};
use crate::data::schema::Pooling;
use crate::data::{DataError, FittedEncoder};
use crate::graph::DType;
use crate::graph::exec::Device;
use crate::model::build::{EmbeddingSpec, FeatureSpec, Pooled};

/// Largest table that one device buffer holds, in bytes; the CPU has no limit.
fn table_limit(device: &Device) -> usize {
    match device {
        Device::Cpu => usize::MAX,
        Device::Gpu(g, _) => {
            let l = g.limits();
            l.max_storage_buffer_binding_size.min(l.max_buffer_size) as usize
        }
    }
}

/// Packs neighbouring categorical columns into tables that fit the device's buffers, for batches of any size:
/// `capacity` of a pooled table is that of one example ([`FeatureSpec::for_batch`]). Lists, and columns that share a
/// table, have it by themselves.
pub fn pack_tables(
    encoder: &FittedEncoder,
    width: usize,
    device: &Device,
) -> Result<(Vec<GroupLayout>, FeatureSpec), DataError> {
    let rows = encoder.table_rows();
    let limit = table_limit(device);
    let columns = &encoder.schema.categorical;
    let owners = encoder.schema.owners();
    // place of each column among the single-valued, or the multi-valued ones
    let (mut singles, mut lists) = (0, 0);
    let places: Vec<usize> = columns
        .iter()
        .map(|c| {
            let count = if c.list.is_some() { &mut lists } else { &mut singles };
            *count += 1;
            *count - 1
        })
        .collect();
    let single_rows: Vec<u32> =
        (0..columns.len()).filter(|&j| columns[j].list.is_none()).map(|j| rows[j]).collect();
    let shared = |j: usize| owners.iter().filter(|&&o| o == owners[j]).count() > 1;

    let mut layouts: Vec<GroupLayout> = vec![];
    let mut tables: Vec<EmbeddingSpec> = vec![];
    // columns of the packed table under construction, and its bytes
    let mut open: Vec<usize> = vec![];
    let mut held = 0usize;
    let close = |open: &mut Vec<usize>, tables: &mut Vec<EmbeddingSpec>, layouts: &mut Vec<GroupLayout>| {
        let Some(&first) = open.first() else { return Ok(()) };
        tables.push(EmbeddingSpec {
            columns: open.iter().map(|&j| (columns[j].name.clone(), rows[j] as usize)).collect(),
            pooled: None,
            width: columns[first].width.map(|w| w as usize).filter(|&w| w != width),
            slots: open.clone(),
        });
        layouts.push(GroupLayout::pack(open.iter().map(|&j| places[j]).collect(), &single_rows)?);
        open.clear();
        Ok::<_, DataError>(())
    };
    for (j, c) in columns.iter().enumerate() {
        let own = c.width.map_or(width, |w| w as usize);
        if c.list.is_some() || shared(j) {
            close(&mut open, &mut tables, &mut layouts)?;
            // a shared table is made where its first column stands
            if owners[..j].contains(&owners[j]) {
                continue;
            }
            let users: Vec<usize> = (j..columns.len()).filter(|&k| owners[k] == owners[j]).collect();
            let bags = users.iter().map(|&k| match &columns[k].list {
                None => Bag::Single(places[k]),
                Some(list) => Bag::List { column: places[k], most: list.max_length.max(1) },
            });
            let pooling = users.iter().find_map(|&k| Some(columns[k].list.as_ref()?.pooling));
            let (bags, lengths) = (bags.collect(), encoder.lengths.clone());
            let layout = PooledLayout { bags, mean: pooling == Some(Pooling::Mean), lengths };
            let owner = owners[j];
            tables.push(EmbeddingSpec {
                columns: vec![(columns[owner].name.clone(), rows[owner] as usize)],
                pooled: Some(Pooled { capacity: layout.capacity(), mean: layout.mean, bags: users.len() }),
                width: Some(own).filter(|&w| w != width),
                slots: users,
            });
            layouts.push(GroupLayout::pooled(rows[owner], layout));
            continue;
        }
        let bytes = DType::F32.bytes(rows[j] as usize * own);
        // a projection is a column's own
        let alone = |k: &usize| columns[*k].width.is_some_and(|w| w as usize != width);
        if held + bytes > limit || own != width || open.first().is_some_and(alone) {
            close(&mut open, &mut tables, &mut layouts)?;
        }
        held = if open.is_empty() { bytes } else { held + bytes };
        open.push(j);
    }
    close(&mut open, &mut tables, &mut layouts)?;
    Ok((layouts, FeatureSpec { numeric: encoder.schema.features(), tables }))
}
