use std::fs;

use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;
use crate::ops::round;

type Named = (&'static str, Vec<usize>, Vec<f32>);

fn sample() -> Vec<Named> {
    let values = |n: usize, scale: f32| (0..n).map(|i| (i as f32 - 2.5) * scale).collect();
    vec![
        ("layers.0.attention.wq", vec![4, 4], values(16, 0.1)),
        ("head.bias", vec![1], vec![-1.5]),
        ("embedding.C1", vec![5, 4], values(20, 1e-30)),
        ("scalar", vec![], vec![f32::MIN_POSITIVE]),
        ("empty", vec![0, 4], vec![]),
    ]
}

fn specs(tensors: &[Named]) -> Vec<TensorSpec> {
    tensors.iter().map(|(name, shape, _)| TensorSpec::f32(*name, shape.clone())).collect()
}

fn refs(tensors: &[Named]) -> Vec<TensorRef<'_>> {
    tensors.iter().map(|(name, shape, data)| TensorRef { name, shape, dtype: DType::F32, data }).collect()
}

fn meta() -> CheckpointMeta {
    let extra = [("ne".to_owned(), "0.81".to_owned())].into();
    CheckpointMeta { step: 120, seed: u64::MAX, extra, birkhoff: env!("CARGO_PKG_VERSION").into() }
}

/// A folder with a good checkpoint.
fn saved() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("weights.safetensors");
    save(&path, &refs(&sample()), &meta()).expect("save");
    (dir, path)
}

#[track_caller]
fn fails(path: &Path, expected: &[TensorSpec], words: &str) {
    let line = load(path, expected).expect_err(words).to_string();
    assert!(line.contains(words) && line.contains("weights.safetensors: ") && !line.contains('\n'), "{line}");
}

#[test]
fn what_is_saved_is_loaded_in_the_order_asked_for() {
    let (_dir, path) = saved();
    let tensors = sample();
    let loaded = load(&path, &specs(&tensors)).expect("load");
    assert_eq!(loaded.meta, meta());
    for ((name, _, data), got) in tensors.iter().zip(&loaded.tensors) {
        assert_eq!(data, got, "{name}");
    }
    let header = read_header(&path).expect("header");
    assert_eq!((header.meta, header.tensors.len()), (meta(), 5));
    assert!(header.tensors.contains(&TensorSpec::f32("embedding.C1", [5, 4])));
}

#[test]
fn the_file_is_plain_safetensors_and_repeats_bit_for_bit() {
    let (_dir, path) = saved();
    let bytes = fs::read(&path).expect("read");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let wq = file.tensor("layers.0.attention.wq").expect("tensor");
    assert_eq!((wq.dtype(), wq.shape()), (Dtype::F32, &[4, 4][..]));
    assert_eq!(wq.data(), bytemuck::cast_slice::<f32, u8>(&sample()[0].2));
    let mut reversed = sample();
    reversed.reverse();
    save(&path, &refs(&reversed), &meta()).expect("again");
    assert_eq!(fs::read(&path).expect("read"), bytes);
}

#[test]
fn files_of_other_tools_load() {
    let (_dir, path) = saved();
    let data: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![2], &data).expect("view");
    fs::write(&path, safetensors::serialize([("w", view)], None).expect("bytes")).expect("write");
    let w = [TensorSpec::f32("w", [2])];
    let loaded = load(&path, &w).expect("load");
    assert_eq!((loaded.meta, loaded.tensors), (CheckpointMeta::default(), vec![vec![1.0, 2.0]]));

    let view = safetensors::tensor::TensorView::new(Dtype::F16, vec![4], &data).expect("view");
    fs::write(&path, safetensors::serialize([("w", view)], None).expect("bytes")).expect("write");
    fails(&path, &[TensorSpec::f32("w", [4])], "tensor `w` is F16; birkhoff reads F32");
}

/// Tensors of 16 bits are two bytes an element, whole or in parts, and come back as what was rounded.
#[test]
fn halves_take_half_the_bytes() {
    let (dir, path) = saved();
    let values: Vec<f32> = (0..15).map(|i| (i as f32 - 7.3) * 1.7e-3).collect();
    let specs: Vec<TensorSpec> = [("a", DType::F16), ("b", DType::F32), ("c", DType::BF16)]
        .map(|(name, dtype)| TensorSpec { dtype, ..TensorSpec::f32(name, [3, 5]) })
        .into();
    let refs: Vec<TensorRef<'_>> = specs.iter().map(|s| s.with(&values)).collect();
    save(&path, &refs, &meta()).expect("save");
    let bytes = fs::read(&path).expect("read");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let of = |name: &str| file.tensor(name).map(|t| (t.dtype(), t.data().len())).expect("there");
    assert_eq!(["a", "b", "c"].map(of), [(Dtype::F16, 30), (Dtype::F32, 60), (Dtype::BF16, 30)]);
    let loaded = load(&path, &specs).expect("load");
    let rounded = |dtype| values.iter().map(|x| round::load::<f32>(dtype, round::store(dtype, *x))).collect();
    assert_eq!(loaded.tensors, [rounded(DType::F16), values.clone(), rounded(DType::BF16)]);
    assert_ne!(loaded.tensors[0], loaded.tensors[2]);
    assert_eq!(read_header(&path).expect("header").tensors, specs);
    // in parts that end anywhere
    let streamed = dir.path().join("streamed.safetensors");
    let all = [&values[..], &values, &values].concat();
    save_parts(&streamed, &specs, &meta(), &mut |push| all.chunks(7).try_for_each(&mut *push)).expect("save");
    assert_eq!(fs::read(&streamed).expect("read"), bytes);
    // another type is another model's, and a type is part of what the header's checksum covers
    let wrong = [TensorSpec::f32("a", [3, 5]), specs[1].clone(), specs[2].clone()];
    fails(&path, &wrong, "tensor `a` is F16; birkhoff reads F32 here");
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let at = text.find("\"BF16\"").expect("in the header");
    let mut damaged = bytes.clone();
    damaged[at..at + 6].copy_from_slice(b" \"F16\"");
    fs::write(&path, &damaged).expect("write");
    let mut other = specs.clone();
    other[2].dtype = DType::F16;
    fails(&path, &other, "the header does not match its checksum");
}

#[test]
fn differences_from_the_model_are_named() {
    let (_dir, path) = saved();
    let good = specs(&sample());
    let mut expected = good.clone();
    expected[0].shape = vec![8, 8];
    fails(
        &path,
        &expected,
        "tensor `layers.0.attention.wq` has shape [4, 4], the model expects [8, 8]; the weights belong to another config.toml",
    );
    let mut expected = good.clone();
    expected[2].shape = vec![6, 4];
    fails(&path, &expected, "[5, 4], the model expects [6, 4]; the weights belong to another vocab.json");
    let mut expected = good.clone();
    expected[0].shape = vec![16];
    fails(&path, &expected, "has shape [4, 4], the model expects [16]");
    let mut expected = good.clone();
    expected.push(TensorSpec::f32("layers.1.linear.w", [3]));
    expected.push(TensorSpec::f32("layers.2.linear.w", [3]));
    fails(&path, &expected, "has no tensor `layers.1.linear.w` [3] (and 1 more)");
    fails(&path, &good[1..], "has a tensor `layers.0.attention.wq` that the model does not");
}

#[test]
fn impossible_tensors_are_not_saved() {
    let (_dir, path) = saved();
    let before = fs::read(&path).expect("read");
    let t = |name, shape, data| TensorRef { name, shape, dtype: DType::F32, data };
    for bad in [
        vec![t("a", &[2][..], &[1.0][..])],
        vec![t("a", &[usize::MAX, 2], &[1.0])],
        vec![t("a", &[1], &[1.0]), t("b", &[1], &[1.0]), t("a", &[1], &[2.0])],
        vec![t("__metadata__", &[1], &[1.0])],
    ] {
        save(&path, &bad, &meta()).expect_err("refused");
        assert_eq!(fs::read(&path).expect("read"), before);
    }
}

#[test]
fn what_is_no_checkpoint_is_one_line() {
    let (dir, path) = saved();
    let good = specs(&sample());
    let bytes = fs::read(&path).expect("read");
    let write = |b: &[u8]| fs::write(&path, b).expect("write");
    write(b"");
    fails(&path, &good, "it has 0 bytes");
    write(b"PK\x03\x04 surely not\n\n weights");
    fails(&path, &good, "not a safetensors file, or damaged: its header claims");
    write(&[&10u64.to_le_bytes()[..], b"{\"a\n\": {  "].concat());
    fails(&path, &good, "its header");
    // Sizes that would overflow or exhaust memory if they were believed.
    for header in [
        r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#,
    ] {
        write(&[&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat());
        fails(&path, &[TensorSpec::f32("a", [2])], "damaged");
    }
    for cut in [1, 4, 40, bytes.len() / 2, bytes.len() - 9] {
        write(&bytes[..bytes.len() - cut]);
        fails(&path, &good, "damaged");
    }
    write(&[&bytes[..], b"x"].concat());
    fails(&path, &good, "damaged");
    let newer = String::from_utf8_lossy(&bytes[8..400])
        .replace("\"birkhoff_format\":\"1\"", "\"birkhoff_format\":\"9\"");
    write(&[&bytes[..8], newer.as_bytes(), &bytes[400..]].concat());
    fails(&path, &good, "in format 9; this version reads up to 1");
    fs::remove_file(&path).expect("remove");
    fails(&path, &good, "no such file");
    fs::create_dir(&path).expect("folder");
    fails(&path, &good, "is a folder");
    drop(dir);
}

proptest! {
    /// Any damage to any byte is found: the load fails with one line, or gives the same weights
    /// (damage to blanks or to free text of the metadata).
    #[test]
    fn damage_is_found(at in 0usize..2000, bit in 0u32..8, length in 0usize..2000, cut in any::<bool>()) {
        let (_dir, path) = saved();
        let mut bytes = fs::read(&path).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        if cut {
            bytes.truncate(length % bytes.len());
        }
        fs::write(&path, &bytes).unwrap();
        match load(&path, &specs(&sample())) {
            Ok(c) => {
                prop_assert!(!cut);
                for ((_, _, data), got) in sample().iter().zip(&c.tensors) {
                    prop_assert_eq!(data, got);
                }
            }
            Err(e) => prop_assert!(!e.to_string().contains('\n')),
        }
    }
}

#[test]
fn parts_make_the_same_file() {
    let (dir, path) = saved();
    let mut tensors = sample();
    tensors.sort_by_key(|t| t.0);
    let streamed = dir.path().join("streamed.safetensors");
    let fill = |push: &mut dyn FnMut(&[f32]) -> anyhow::Result<()>| {
        tensors.iter().flat_map(|t| t.2.chunks(3)).try_for_each(push)
    };
    save_parts(&streamed, &specs(&sample()), &meta(), &mut { fill }).expect("save");
    assert_eq!(fs::read(&path).expect("read"), fs::read(&streamed).expect("read"));
    // what goes wrong in between is told, and the old file stays
    let mut count = 0;
    let e = save_parts(&streamed, &specs(&sample()), &meta(), &mut |push| {
        push(&[1.0])?;
        count += 1;
        anyhow::bail!("lost rank 1")
    });
    assert_eq!((e.expect_err("lost").to_string(), count), ("lost rank 1".into(), 1));
    assert_eq!(fs::read(&path).expect("read"), fs::read(&streamed).expect("read"));
    let words = CheckpointError { path: "a b".into(), message: "c\nd".into(), damaged: true };
    assert_eq!(CheckpointError::from_words(&words.to_words()), words);
}
