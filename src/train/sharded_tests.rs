use super::*;
use crate::graph::DType;
use crate::train::checkpoint::{TensorRef, save};
use crate::train::run::{checkpoint_name, shard_name};
use proptest::prelude::*;
use std::fs;

const STEP: u64 = 7;

fn spec(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec::f32(name, shape)
}

/// A number that says where it belongs.
fn value(tensor: usize, row: usize, column: usize) -> f32 {
    (tensor * 10_000 + row * 100 + column) as f32
}

/// What each rank writes of which tensor.
type Cuts = Vec<Vec<(usize, Part)>>;

fn part(rows: Range<usize>, columns: Range<usize>) -> Part {
    Part { rows, columns }
}

/// A checkpoint with one dense tensor, and tables cut so.
fn write(folder: &Path, tables: &[TensorSpec], cuts: &Cuts) -> PathBuf {
    let meta = CheckpointMeta { step: STEP, seed: 3, ..CheckpointMeta::default() };
    let shards: Vec<Shard> = cuts
        .iter()
        .enumerate()
        .map(|(rank, parts)| {
            let written: Vec<(TensorSpec, Vec<f32>)> = parts
                .iter()
                .map(|(t, p)| {
                    let row = |r| p.columns.clone().map(move |c| value(*t, r, c));
                    (part_spec(&tables[*t], p), p.rows.clone().flat_map(row).collect())
                })
                .collect();
            let refs = written.iter().map(|(s, data)| s.with(data));
            let file = shard_name(STEP, rank, cuts.len());
            let sum = save(&folder.join(&file), &refs.collect::<Vec<_>>(), &meta).unwrap();
            Shard { file, sum: format!("{sum:016x}") }
        })
        .collect();
    let path = folder.join(checkpoint_name(STEP));
    let extra = [(SHARDS.to_owned(), serde_json::to_string(&shards).unwrap())].into();
    let dense = TensorRef { name: "dense[0..2]", shape: &[2], dtype: DType::F32, data: &[1.0, 2.0] };
    save(&path, &[dense], &CheckpointMeta { extra, ..meta }).unwrap();
    path
}

fn tables() -> Vec<TensorSpec> {
    // a name that looks like a part of one; numbers that 16 bits hold
    let halves = TensorSpec { dtype: DType::F16, ..spec("embeddings.a[0..3]", &[9, 4]) };
    vec![halves, spec("embeddings.b", &[5, 4]), spec("embeddings.b#acc", &[5])]
}

fn cuts() -> Cuts {
    vec![
        vec![(0, part(0..4, 0..4)), (1, part(0..5, 0..1)), (2, part(3..5, 0..1))],
        vec![(0, part(4..9, 0..4)), (1, part(0..5, 1..4)), (2, part(0..3, 0..1))],
    ]
}

fn whole(tensor: usize, shape: &[usize]) -> Vec<f32> {
    let Part { rows, columns } = Part::whole(shape);
    rows.flat_map(|r| columns.clone().map(move |c| value(tensor, r, c))).collect()
}

#[test]
fn parts_are_read_as_one_and_gathered() {
    let dir = tempfile::tempdir().unwrap();
    let tables = tables();
    let path = write(dir.path(), &tables, &cuts());
    let mut c = Checkpoint::open(&path).unwrap();
    assert_eq!((c.files(), c.meta().step, c.meta().extra.len()), (3, STEP, 0));
    c.verify(|_| true).unwrap();
    let mut all = vec![spec("dense[0..2]", &[2])];
    all.extend(tables.clone());
    c.check(&all).unwrap();
    assert_eq!(c.tensors(), all);
    for (i, t) in tables.iter().enumerate() {
        assert_eq!(c.whole(&t.name).unwrap(), whole(i, &t.shape), "{}", t.name);
    }
    // as one file: the same bytes as if it had never been cut
    let (gathered, plain) = (dir.path().join("g.safetensors"), dir.path().join("p.safetensors"));
    let meta = c.meta().clone();
    c.gather(&gathered, &all, &meta).unwrap();
    let values: Vec<Vec<f32>> = tables.iter().enumerate().map(|(i, t)| whole(i, &t.shape)).collect();
    let mut refs = vec![TensorRef { name: "dense[0..2]", shape: &[2], dtype: DType::F32, data: &[1.0, 2.0] }];
    refs.extend(tables.iter().zip(&values).map(|(t, v)| t.with(v)));
    save(&plain, &refs, &meta).unwrap();
    assert_eq!(fs::read(&gathered).unwrap(), fs::read(&plain).unwrap());
    Checkpoint::open(&gathered).unwrap().verify(|_| true).unwrap();
}

#[track_caller]
fn refused(path: &Path, words: &str) {
    let opened = Checkpoint::open(path).and_then(|mut c| c.verify(|_| true));
    let e = opened.expect_err(words);
    let line = e.to_string();
    assert!(e.is_damaged() && line.contains(words) && !line.contains('\n'), "{line}");
}

#[test]
fn a_checkpoint_is_whole_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &tables(), &cuts());
    let shard = dir.path().join(shard_name(STEP, 1, 2));
    let good = fs::read(&shard).unwrap();
    fs::remove_file(&shard).unwrap();
    refused(&path, "step-000000007-00001-of-00002.safetensors: is missing, a part of the checkpoint");
    // one value of another training: the header differs by the checksum of the data
    let other = tempfile::tempdir().unwrap();
    let swapped = vec![cuts()[1].clone(), cuts()[0].clone()];
    write(other.path(), &tables(), &swapped);
    fs::copy(other.path().join(shard_name(STEP, 0, 2)), &shard).unwrap();
    Checkpoint::open(&path).unwrap().verify(|_| true).expect("the same content");
    fs::copy(other.path().join(shard_name(STEP, 1, 2)), &shard).unwrap();
    refused(&path, "is not the file that was written with the checkpoint");
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    fs::write(&shard, &bad).unwrap();
    refused(&path, "do not match their checksum");
    fs::write(&shard, &good[..good.len() - 1]).unwrap();
    refused(&path, "cut off");
    fs::write(&shard, &good).unwrap();
    Checkpoint::open(&path).unwrap().verify(|_| true).unwrap();
    // a gap, and a value that is there twice
    let mut gap = cuts();
    gap[1][0].1.rows.start = 5;
    refused(
        &write(dir.path(), &tables(), &gap),
        "the parts of `embeddings.a[0..3]` in its 3 files do not make [9, 4]",
    );
    let mut twice = cuts();
    twice[1][1].1 = part(0..5, 0..3);
    refused(&write(dir.path(), &tables(), &twice), "the parts of `embeddings.b`");
}

#[test]
fn names_of_files_stay_in_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &tables(), &cuts());
    let shards =
        vec![Shard { file: "../step-000000007-00001-of-00002.safetensors".into(), sum: String::new() }];
    let extra = [(SHARDS.to_owned(), serde_json::to_string(&shards).unwrap())].into();
    save(&path, &[], &CheckpointMeta { extra, ..CheckpointMeta::default() }).unwrap();
    refused(&path, "which cannot be");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// However a table is cut, every part of it is read.
    #[test]
    fn any_part_of_any_cut(
        rows in 1usize..40, columns in 1usize..9,
        row_cuts in prop::collection::vec(0usize..40, 0..4), column_cut in 0usize..9,
        from in (0usize..40, 0usize..40), wide in (0usize..9, 0usize..9),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let table = spec("embeddings.t", &[rows, columns]);
        let mut at: Vec<usize> = row_cuts.into_iter().map(|c| c % (rows + 1)).chain([0, rows]).collect();
        at.sort_unstable();
        at.dedup();
        let split = column_cut % (columns + 1);
        let mut ranks: Cuts = vec![vec![]; 3];
        for (i, pair) in at.windows(2).enumerate() {
            for (j, c) in [0..split, split..columns].into_iter().enumerate().filter(|c| !c.1.is_empty()) {
                ranks[(i + j) % 3].push((0, part(pair[0]..pair[1], c)));
            }
        }
        let path = write(dir.path(), std::slice::from_ref(&table), &ranks);
        let mut c = Checkpoint::open(&path).unwrap();
        c.verify(|_| true).unwrap();
        let order = |(a, b): (usize, usize), n: usize| (a % (n + 1)).min(b % (n + 1))..(a % (n + 1)).max(b % (n + 1));
        let (r, w) = (order(from, rows), order(wide, columns));
        let want: Vec<f32> = r.clone().flat_map(|i| w.clone().map(move |j| value(0, i, j))).collect();
        prop_assert_eq!(c.read("embeddings.t", &part(r, w)).unwrap(), want);
        prop_assert_eq!(c.whole("embeddings.t").unwrap(), whole(0, &table.shape));
    }
}
