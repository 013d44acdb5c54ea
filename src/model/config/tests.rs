use proptest::prelude::*;

use super::*;

fn load(text: &str, sets: &[&str]) -> Result<Config, ConfigError> {
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    Config::from_text("config.toml", text, &sets)
}

#[track_caller]
fn fails(text: &str, sets: &[&str], expected: &str) {
    match load(text, sets) {
        Ok(_) => panic!("accepted {text:?} {sets:?}; expected: {expected}"),
        Err(e) => assert_eq!(e.to_string(), expected),
    }
}

fn plan(text: &str, m: usize) -> Result<Vec<LayerPlan>, ConfigError> {
    load(text, &[]).expect("valid").model.resolve(m)
}

#[test]
fn no_file_gives_the_defaults() {
    let c = Config::load(None, &[]).expect("defaults");
    assert_eq!(c, Config::default());
    assert_eq!((c.model.layers, c.model.residual.streams), (4, 4));
    assert_eq!(c.model.residual.mode, ResidualMode::Mhc);
    let kinds: Vec<Kind> = c.model.modules.iter().map(|m| m.kind.kind()).collect();
    assert_eq!(kinds, [Kind::Attention, Kind::Linear]);
}

#[test]
fn every_section_is_read() {
    let text = r#"
        [model]
        width = 24
        slots = 5
        ensemble = "weighted"
        [[model.modules]]
        kind = "cross"
        rank = 8
        depth = 3
        [[model.modules]]
        kind = "conv"
        kernel = [1, 5]
        [[model.layer]]
        [[model.layer]]
        slots = 7
        ensemble = "concat"
        modules = [{ kind = "dlrm", compressed = 2, hidden = [9, 8], slots = 3 }, { kind = "fm" }]
        [model.residual]
        mode = "hc"
        learn = ["res"]
        alpha_init = 1
        [model.features]
        dense_hidden = []
        [data]
        ids = "hash"
        numeric = "none"
        [train]
        lr = 2e-3
        embedding = "adam"
        seed = 9_223_372_036_854_775_807
    "#;
    let c = load(text, &["train.batch=0x40"]).expect("valid");
    assert_eq!((c.model.layers, c.model.width, c.model.slots), (2, 24, 5));
    assert_eq!(c.model.modules[0].kind, ModuleKind::Cross { form: CrossForm::LowRank, rank: 8, depth: 3 });
    assert_eq!(c.model.modules[1].kind, ModuleKind::Conv { channels: 4, kernel: [1, 5] });
    assert_eq!(c.model.layer[0], LayerConfig::default());
    assert_eq!(c.model.layer[1].modules.as_ref().map(Vec::len), Some(2));
    assert!(c.model.residual.learns(Coefficient::Res) && !c.model.residual.learns(Coefficient::Pre));
    assert_eq!((c.model.residual.alpha_init, c.train.lr, c.train.batch), (1.0, 2e-3, 64));
    assert_eq!(c.train.seed, i64::MAX as u64);
    assert_eq!((c.data.ids, c.data.numeric), (Encoding::Hash, Numeric::None));
    let written = c.to_toml().expect("toml");
    assert_eq!(load(&written, &[]).expect("own output"), c, "{written}");
}

#[test]
fn unknown_keys_are_named_with_place_and_suggestion() {
    fails(
        "[model]\nlayers = 3\n\nwidht = 8\n",
        &[],
        "config.toml:4: unknown key `model.widht`; did you mean `model.width`?",
    );
    fails(
        "",
        &["model.widht=3"],
        "--set model.widht=3: unknown key `model.widht`; did you mean `model.width`?",
    );
    fails("[modle]\n", &[], "config.toml:1: unknown key `modle`; did you mean `model`?");
    fails("batch = 4", &[], "config.toml:1: unknown key `batch`; did you mean `train.batch`?");
    fails("", &["model.lr=1"], "--set model.lr=1: unknown key `model.lr`; did you mean `train.lr`?");
    fails(
        "[model.features]\nzzzzzzzz = 1",
        &[],
        "config.toml:2: unknown key `model.features.zzzzzzzz`; model.features takes dense_slots, dense_hidden",
    );
    fails(
        "[[model.modules]]\nkind = \"linear\"\nheads = 2",
        &[],
        "config.toml:3: unknown key `model.modules[0].heads`; model.modules[0] takes kind, slots",
    );
    fails(
        "\"a\\nb\" = 1",
        &[],
        "config.toml:1: unknown key `\"a\\nb\"`; the top level takes model, data, train",
    );
}

#[test]
fn wrong_types_say_what_was_expected() {
    fails(
        "[model]\nwidth = \"a\"",
        &[],
        "config.toml:2: model.width expects a whole number of at least 0, found the text \"a\"",
    );
    fails(
        "",
        &["train.batch=-1"],
        "--set train.batch=-1: train.batch expects a whole number of at least 0, found -1",
    );
    fails("", &["train.lr=nan"], "--set train.lr=nan: train.lr expects a finite number, found NaN");
    fails("model = 3", &[], "config.toml:1: model expects a table, found 3");
    fails(
        "",
        &["model.residual.mode=mch"],
        "--set model.residual.mode=mch: model.residual.mode expects one of shortcut, hc, mhc, found the text \
         \"mch\"; did you mean \"mhc\"?",
    );
    fails(
        "[model]\nmodules = [{ kind = \"linear\" }, {}]",
        &[],
        "config.toml:2: model.modules[1].kind is missing; it is one of attention, linear, cross, gram, dlrm, \
         conv, fm, mlp",
    );
    fails(
        "[model.head]\nhidden = [1,\n 2.5]",
        &[],
        "config.toml:3: model.head.hidden[1] expects a whole number of at least 0, found 2.5",
    );
    fails(
        "[train]\nseed = 9223372036854775808",
        &[],
        "config.toml:2: train.seed = 9223372036854775808 does not fit in 64 bits",
    );
}

#[test]
fn broken_toml_names_the_line() {
    let e = load("[model]\nlayers = \n", &[]).expect_err("broken").to_string();
    assert!(e.starts_with("config.toml:2: not valid TOML: ") && !e.contains('\n'), "{e}");
    let e = load("[train]\nlr = 1\nlr = 2\n", &[]).expect_err("twice").to_string();
    assert!(e.starts_with("config.toml:3: ") && e.contains("duplicate"), "{e}");
}

#[test]
fn set_edits_values_lists_and_elements() {
    let c = load("[model]\nlayers = 2", &["model.residual.mode=hc", "model.layers=6"]).expect("valid");
    assert_eq!((c.model.residual.mode, c.model.layers), (ResidualMode::Hc, 6));
    let c = load("", &["model.modules=[{kind=\"cross\",form=\"low-rank\",rank=8}]"]).expect("valid");
    assert_eq!(c.model.modules[0].kind, ModuleKind::Cross { form: CrossForm::LowRank, rank: 8, depth: 2 });
    let c = load("", &["model.modules[0].heads=8"]).expect("valid");
    assert_eq!(c.model.modules[0].kind, ModuleKind::Attention { heads: 8, ffn: 0 });
    assert_eq!(c.model.modules.len(), 2);
    let c = load("", &["model.residual.learn=[\"pre\"]", " train.seed = 7 "]).expect("valid");
    assert_eq!((c.model.residual.learn, c.train.seed), (vec![Coefficient::Pre], 7));
    // A table given whole replaces the file's.
    let c = load("[model.residual]\nstreams = 2", &["model.residual={mode=\"hc\"}"]).expect("valid");
    assert_eq!((c.model.residual.mode, c.model.residual.streams), (ResidualMode::Hc, 4));
}

#[test]
fn bad_sets_are_explained() {
    fails("", &["model.layers"], "--set model.layers: expected KEY=VALUE, for example --set model.layers=4");
    fails("", &["=3"], "--set =3: \"\" is not a key such as model.width or model.modules[0].heads");
    fails(
        "",
        &["model.layers="],
        "--set model.layers=: model.layers is given no value; write KEY=\"\" for an empty text",
    );
    fails(
        "[model]\nwidth = 8",
        &["model.width.x=3"],
        "--set model.width.x=3: model.width is 8, not a table: it has no key \"x\"",
    );
    fails(
        "",
        &["model.modules[2].heads=3"],
        "--set model.modules[2].heads=3: model.modules has 2 elements, 0 to 1: no element 2",
    );
    let e = load("", &["model.head.hidden=[1,"]).expect_err("open list").to_string();
    assert!(
        e.starts_with("--set model.head.hidden=[1,: the value of model.head.hidden is not valid TOML"),
        "{e}"
    );
}

#[test]
fn validation_names_key_place_and_remedy() {
    fails(
        "[model]\n[[model.modules]]\nkind = \"attention\"\nheads = 3",
        &[],
        "config.toml:4: model.modules[0].heads = 3 does not divide model.width = 16; use 1, 2, 4, 8 or 16",
    );
    fails(
        "",
        &["model.residual.streams=9"],
        "--set model.residual.streams=9: model.residual.streams = 9 is out of range; it goes from 1 to 8",
    );
    fails(
        "[[model.layer]]\n[[model.layer]]\nmodules = [{kind = \"conv\", kernel = [3, 2]}]",
        &[],
        "config.toml:3: model.layer[1].modules[0].kernel[1] = 2 is even; use 1 or 3",
    );
    fails(
        "[model]\nlayers = 3\n[[model.layer]]",
        &[],
        "config.toml:2: model.layers = 3 but there are 1 [[model.layer]] tables; leave model.layers out, or \
         write 3 tables",
    );
    fails(
        "[model]\nmodules = [{kind = \"cross\", form = \"low-rank\"}]",
        &[],
        "config.toml: model.modules[0].rank must be at least 1 with form = \"low-rank\"; try \
         model.modules[0].rank = 16",
    );
    for (set, key) in [
        ("model.width=0", "model.width"),
        ("model.layers=0", "model.layers"),
        ("model.layers=100000", "model.layers"),
        ("model.width=4611686018427387904", "model.width"),
        ("model.modules=[]", "model.modules"),
        ("model.modules=[{kind=\"mlp\",hidden=[]}]", "model.modules[0].hidden"),
        ("model.modules=[{kind=\"mlp\",hidden=[4,0]}]", "model.modules[0].hidden[1]"),
        ("model.modules=[{kind=\"cross\",form=\"vector\",rank=3}]", "model.modules[0].rank"),
        ("model.modules[0].heads=0", "model.modules[0].heads"),
        ("model.residual.streams=0", "model.residual.streams"),
        ("model.residual.learn=[\"pre\",\"pre\"]", "model.residual.learn[1]"),
        ("model.residual.sinkhorn_iterations=0", "model.residual.sinkhorn_iterations"),
        ("model.features.dense_slots=0", "model.features.dense_slots"),
        ("data.min_count=0", "data.min_count"),
        ("data.buckets=0", "data.buckets"),
        ("train.batch=0", "train.batch"),
        ("train.lr=0", "train.lr"),
        ("train.beta2=1", "train.beta2"),
        ("train.epochs=0", "train.epochs"),
        ("train.clip=-1", "train.clip"),
    ] {
        let e = load("", &[set]).expect_err(set);
        assert_eq!(e.key(), Some(key), "{e}");
        assert!(e.to_string().starts_with(&format!("--set {set}: {key}")), "{e}");
    }
    let column =
        "[data]\ncolumns = [{ name = 'x', kind = 'numeric', transform = 'none', standardize = true }]";
    assert_eq!(load(column, &[]).expect_err("no logarithm").key(), Some("data.columns[0].standardize"));
}

#[test]
fn shapes_of_sum_and_weighted() {
    let layers = plan("", 27).expect("defaults");
    assert_eq!(layers.len(), 4);
    assert_eq!((layers[3].index, layers[3].slots_in, layers[3].slots_out), (3, 27, 27));
    assert!(!layers[0].shortcut_weight);
    assert_eq!(layers[0].modules[0].kind, ModuleKind::Attention { heads: 2, ffn: 32 });

    let layers = plan("[model]\nslots = 5\nlayers = 2", 9).expect("valid");
    assert!(layers[0].shortcut_weight && !layers[1].shortcut_weight);
    assert_eq!((layers[0].slots_out, layers[1].slots_in, layers[0].modules[1].slots), (5, 5, 5));

    // All modules give the same count of their own.
    let text = "[model]\nlayers = 1\nmodules = [{kind=\"fm\", slots=3}, {kind=\"fm\", slots=3}]";
    let layer = &plan(text, 9).expect("valid")[0];
    assert_eq!((layer.slots_out, layer.modules[1].name.as_str()), (3, "fm_1"));

    let e = plan("[model]\nmodules = [{kind=\"fm\", slots=3}, {kind=\"gram\"}]", 9).expect_err("3 and 9");
    assert_eq!(
        e.to_string(),
        "model.modules[0].slots = 3 differs from the 9 slots of layer 0's input, and ensemble = \"sum\" adds \
         modules of equal slots; set model.slots = 3 and leave the modules' slots out, or use ensemble = \
         \"concat\""
    );
    // Known before the data: two counts that can never agree.
    let text = "[model]\nmodules = [{kind=\"fm\", slots=3}, {kind=\"gram\", slots=4}]";
    let e = load(text, &[]).expect_err("3 and 4");
    assert!(e.to_string().starts_with("config.toml:2: model.modules[1].slots = 4 differs from"), "{e}");
}

#[test]
fn shapes_of_concat() {
    let text = "[model]\nlayers = 1\nensemble = \"concat\"\nslots = 11\n\
                modules = [{kind=\"fm\"}, {kind=\"gram\", slots=3}, {kind=\"linear\"}, {kind=\"mlp\"}]";
    let layer = &plan(text, 9).expect("valid")[0];
    let each: Vec<usize> = layer.modules.iter().map(|m| m.slots).collect();
    assert_eq!((each, layer.slots_out, layer.shortcut_weight), (vec![4, 3, 2, 2], 11, true));

    let text = "[model]\nlayers = 1\nensemble = \"concat\"";
    let each: Vec<usize> = plan(text, 9).expect("keeps 9")[0].modules.iter().map(|m| m.slots).collect();
    assert_eq!(each, [5, 4]);
    let e = plan(text, 1).expect_err("one slot for two modules");
    assert_eq!(
        e.to_string(),
        "layer 0 keeps its 1 input slots (model.slots = 0), too few for ensemble = \"concat\" of 2 modules in \
         layer 0; set model.slots to at least 2"
    );
    let e = load(&format!("{text}\nslots = 1"), &[]).expect_err("known early").to_string();
    assert!(e.starts_with("config.toml:4: model.slots = 1, too few"), "{e}");
    let text = "[model]\nensemble = \"concat\"\nslots = 7\nmodules = [{kind=\"fm\", slots=3}]";
    let e = load(text, &[]).expect_err("7 is not 3").to_string();
    assert!(e.ends_with("slots = 7 but the modules of layer 0 output 3 slots together; use 3"), "{e}");
}

#[test]
fn impossible_sizes_are_refused_without_overflow() {
    let cross = "[model]\nwidth = 4096\nmodules = [{kind=\"cross\"}]";
    let e = plan(cross, 1000).expect_err("4e6 squared").to_string();
    assert!(e.contains("model.modules[0]: a full cross module") && e.contains("low-rank"), "{e}");
    for kind in ["attention", "linear", "gram", "dlrm", "conv", "fm", "mlp"] {
        let text = format!("[model]\nwidth = 8192\nslots = 65536\nmodules = [{{kind=\"{kind}\"}}]");
        let e = plan(&text, 65536).expect_err(kind);
        assert!(e.to_string().contains("2^30"), "{kind}: {e}");
    }
    assert!(plan("", 0).is_err() && plan("", usize::MAX).is_err());
}

#[test]
fn files_that_are_no_configuration() {
    let dir = tempfile::tempdir().expect("temp dir");
    let check = |name: &str, bytes: Option<&[u8]>, expected: &str| {
        let path = dir.path().join(name);
        if let Some(bytes) = bytes {
            std::fs::write(&path, bytes).expect("write");
        }
        let e = Config::load(Some(&path), &[]).expect_err(name).to_string();
        assert!(e.contains(expected) && e.contains(name) && !e.contains('\n'), "{e}");
    };
    check("", None, "is a directory");
    check("missing.toml", None, "no such configuration file");
    check("binary.toml", Some(b"[model]\n\xff\xfe"), "binary.toml:2: is not UTF-8");
    check("huge.toml", Some(&vec![b'#'; MAX_FILE as usize + 1]), "larger than 1 MiB");
    check("deep.toml", Some(format!("a = {}", "[".repeat(100_000)).as_bytes()), "not valid TOML");
}

const SAMPLE: &str = "[model]\nlayers = 2\nwidth = 8\n[[model.modules]]\nkind = \"attention\"\nheads = 4\n\
                      [[model.modules]]\nkind = \"cross\"\nrank = 2\n[model.residual]\nmode = \"hc\"\n\
                      [train]\nlr = 1e-2\nseed = 3\n[data]\nids = \"hash\"\n";

proptest! {
    /// Whatever the text, the answer is a configuration that writes itself back or one line.
    #[test]
    fn damaged_toml_gives_one_line(at in 0..SAMPLE.len(), cut in 0usize..12, put in "[\\PC\n\"\\[\\]=.0-9]{0,6}") {
        let mut bytes = SAMPLE.as_bytes().to_vec();
        bytes.splice(at..(at + cut).min(SAMPLE.len()), put.bytes());
        let text = String::from_utf8_lossy(&bytes);
        match Config::from_text("c.toml", &text, &[]) {
            Ok(c) => prop_assert_eq!(Config::from_text("", &c.to_toml().unwrap(), &[]).unwrap(), c),
            Err(e) => {
                let line = e.to_string();
                prop_assert!(line.starts_with("c.toml") && !line.contains('\n') && line.len() < 2000, "{}", line);
            }
        }
    }

    /// The same for `--set`.
    #[test]
    fn random_sets_give_one_line(key in "(model|train|x)?[.a-z\\[\\]0-9]{0,12}", value in "\\PC{0,12}") {
        if let Err(e) = Config::from_text("", "", &[format!("{key}={value}")]) {
            let line = e.to_string();
            prop_assert!(line.starts_with("--set ") && !line.contains('\n'), "{}", line);
        }
    }

    /// Resolved plans chain, add up, and have unique names, for any layer settings.
    #[test]
    fn plans_are_consistent(
        m in 1usize..40,
        concat in any::<bool>(),
        slots in 0usize..20,
        own in prop::collection::vec(0usize..4, 1..5),
    ) {
        let modules = own.iter().map(|&slots| ModuleConfig { kind: ModuleKind::Linear, slots }).collect();
        let ensemble = if concat { Ensemble::Concat } else { Ensemble::Sum };
        let model = ModelConfig { modules, slots, ensemble, ..ModelConfig::default() };
        let checked = Config { model: model.clone(), ..Config::default() }.validate();
        match model.resolve(m) {
            Err(e) => prop_assert!(e.key().is_some()),
            Ok(layers) => {
                prop_assert!(checked.is_ok(), "validate refused what resolves: {:?}", checked);
                let mut before = m;
                for layer in &layers {
                    prop_assert_eq!(layer.slots_in, before);
                    prop_assert_eq!(layer.shortcut_weight, layer.slots_in != layer.slots_out);
                    let each: Vec<usize> = layer.modules.iter().map(|p| p.slots).collect();
                    prop_assert!(each.iter().all(|&l| l > 0));
                    if concat {
                        prop_assert_eq!(each.iter().sum::<usize>(), layer.slots_out);
                    } else {
                        prop_assert!(each.iter().all(|&l| l == layer.slots_out));
                    }
                    let names: std::collections::HashSet<_> = layer.modules.iter().map(|p| &p.name).collect();
                    prop_assert_eq!(names.len(), own.len());
                    before = layer.slots_out;
                }
            }
        }
    }
}
