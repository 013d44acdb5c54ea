use super::*;
use crate::train::store::Store;
use serde_json::json;

fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).expect("folder").map(|e| e.expect("entry").file_name());
    let mut names: Vec<String> = entries.map(|n| n.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn finished(path: &Path) {
    let run = RunFolder::create(path, false).expect("create");
    run.begin(&Config::default()).expect("begin");
    fs::write(run.weights_path(), b"w").expect("weights");
    run.metrics().expect("log").append(&json!({"step": 1, "loss": 0.5})).expect("append");
    run.finish(&json!({"ne": 0.9})).expect("finish");
}

#[test]
fn a_run_is_written_and_read_back() {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("a/b/run");
    finished(&path);
    assert_eq!(names(&path), [CONFIG, METRICS, SUMMARY, WEIGHTS]);
    let run = RunFolder::open(&path).expect("open");
    assert!(run.is_finished() && run.notice().is_none());
    assert_eq!(run.read_config().expect("config"), Config::default());
    assert_eq!(run.read_summary().expect("summary")["ne"], 0.9);
    let mut log = run.metrics().expect("log");
    log.append(&json!({"step": 2})).expect("append");
    let text = fs::read_to_string(run.metrics_path()).expect("metrics");
    assert_eq!(text, "{\"step\":1,\"loss\":0.5}\n{\"step\":2}\n");
}

#[test]
fn a_finished_run_is_replaced_only_by_force_and_only_its_files() {
    let dir = tempfile::tempdir().expect("temp dir");
    finished(dir.path());
    fs::write(dir.path().join("notes.txt"), "mine").expect("notes");
    fs::write(dir.path().join(".weights.safetensors.tmp-1"), "crash").expect("left over");
    let e = RunFolder::create(dir.path(), false).expect_err("finished").to_string();
    assert!(e.contains("finished run; add --force"), "{e}");

    let run = RunFolder::create(dir.path(), true).expect("forced");
    assert!(run.notice().is_some_and(|n| n.contains("replacing a finished run")));
    assert!(run.is_finished(), "nothing is removed before begin");
    run.begin(&Config::default()).expect("begin");
    assert_eq!(names(dir.path()), [LOCK, CONFIG, "notes.txt"]);
    drop(run);

    let e = RunFolder::create(dir.path(), false).expect_err("unfinished").to_string();
    assert!(e.contains("birkhoff train --resume ") && e.contains("add --force"), "{e}");
    let run = RunFolder::create(dir.path(), true).expect("forced");
    assert!(run.notice().is_some_and(|n| n.contains("replacing an unfinished run")));
}

#[test]
fn a_start_that_fails_leaves_nothing() {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("a/b");
    drop(RunFolder::create(&path, false).expect("create"));
    assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
    // what was there stays, and so does what came into it
    fs::create_dir(dir.path().join("a")).expect("folder");
    drop(RunFolder::create(&path, false).expect("create"));
    assert_eq!(names(dir.path()), ["a"]);
    let run = RunFolder::create(&path, false).expect("create");
    fs::write(path.join("other.txt"), "").expect("file");
    drop(run);
    assert_eq!(names(&path), ["other.txt"]);
}

#[test]
fn folders_of_others_are_never_touched() {
    let dir = tempfile::tempdir().expect("temp dir");
    for (file, text) in [("photo.jpg", "x"), (CONFIG, "[model]\nlayers = 2\n"), (SUMMARY, "{}")] {
        let path = dir.path().join(file.replace('.', "_"));
        fs::create_dir(&path).expect("folder");
        fs::write(path.join(file), text).expect("file");
        for force in [false, true] {
            let e = RunFolder::create(&path, force).expect_err(file).to_string();
            assert!(e.contains("not a birkhoff run"), "{e}");
        }
        assert_eq!(names(&path), [file]);
    }
    let file = dir.path().join("file");
    fs::write(&file, "x").expect("file");
    let e = RunFolder::create(&file, true).expect_err("file").to_string();
    assert!(e.contains("is a file"), "{e}");
    assert!(RunFolder::create(&file.join("below"), true).is_err());
}

#[test]
fn what_a_kill_left_of_the_first_file_is_no_obstacle() {
    let dir = tempfile::tempdir().expect("temp dir");
    fs::write(dir.path().join(".config.toml.tmp-77"), "# birkh").expect("file");
    let run = RunFolder::create(dir.path(), false).expect("create");
    assert_eq!(run.notice(), None);
    run.begin(&Config::default()).expect("begin");
    drop(run);
    assert_eq!(names(dir.path()), [CONFIG]);
    let other = tempfile::tempdir().expect("temp dir");
    fs::write(other.path().join(".notes.tmp-77"), "").expect("file");
    assert!(RunFolder::create(other.path(), false).is_err(), "someone else's");
}

#[test]
fn one_process_trains_into_a_folder() {
    let dir = tempfile::tempdir().expect("temp dir");
    let first = RunFolder::create(dir.path(), false).expect("first");
    first.begin(&Config::default()).expect("begin");
    let e = RunFolder::create(dir.path(), true).expect_err("second").to_string();
    assert!(e.contains("in use"), "{e}");
    drop(first);
    assert!(RunFolder::create(dir.path(), true).is_ok());
}

#[test]
fn opening_what_is_no_run_is_explained() {
    let dir = tempfile::tempdir().expect("temp dir");
    let open = |path: &Path| RunFolder::open(path).expect_err("no run").to_string();
    assert!(open(&dir.path().join("none")).contains("no such run folder"));
    assert!(open(dir.path()).contains("has no config.toml"));
    let run = RunFolder::create(dir.path(), false).expect("create");
    run.begin(&Config::default()).expect("begin");
    assert!(open(dir.path()).contains("did not reach its first checkpoint"));
    assert!(open(&run.config_path()).contains("is a file"));
    fs::write(run.weights_path(), b"").expect("weights");
    fs::write(run.config_path(), "[model]\nwidht = 3").expect("config");
    let e = RunFolder::open(dir.path()).expect("open").read_config().expect_err("misspelt").to_string();
    assert!(e.contains("config.toml:2: unknown key `model.widht`") && !e.contains('\n'), "{e}");
}

#[test]
fn a_failed_write_keeps_the_old_file() {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("f");
    write_atomic(&path, |w| w.write_all(b"old")).expect("first");
    let cut = write_atomic(&path, |w| w.write_all(b"ne").and(Err(io::Error::other("disk full"))));
    let e = cut.expect_err("cut").to_string();
    assert!(e.ends_with("cannot write: disk full"), "{e}");
    assert_eq!((fs::read(&path).expect("old"), names(dir.path())), (b"old".to_vec(), vec!["f".to_owned()]));
    let e = write_atomic(dir.path(), |_| Ok(())).expect_err("folder").to_string();
    assert!(e.contains("it is a folder"), "{e}");
    assert!(write_atomic(&dir.path().join("no/such"), |_| Ok(())).is_err());
}

#[cfg(unix)]
#[test]
fn links_and_devices_survive_a_write() {
    let dir = tempfile::tempdir().expect("temp dir");
    let (file, link) = (dir.path().join("file"), dir.path().join("link"));
    fs::write(&file, "old").expect("file");
    std::os::unix::fs::symlink(&file, &link).expect("link");
    write_atomic(&link, |w| w.write_all(b"new")).expect("through the link");
    assert!(fs::symlink_metadata(&link).expect("link").is_symlink());
    assert_eq!(fs::read(&file).expect("file"), b"new");
    write_atomic(Path::new("/dev/null"), |w| w.write_all(b"gone")).expect("device");
    assert!(!fs::metadata("/dev/null").expect("device").is_file());
}

#[test]
fn checkpoints_of_several_ranks_go_whole() {
    let dir = tempfile::tempdir().expect("temp dir");
    let run = RunFolder::create(dir.path(), false).expect("create");
    run.begin(&Config::default()).expect("begin");
    let folder = dir.path().join(CHECKPOINTS);
    fs::create_dir(&folder).expect("folder");
    let touch = |name: &str| fs::write(folder.join(name), "").expect("file");
    let there = || {
        let all = names(&folder).into_iter();
        all.map(|n| n.trim_end_matches(".safetensors").replace("step-00000", "")).collect::<Vec<_>>()
    };
    for step in [10, 20, 30] {
        touch(&checkpoint_name(step));
        (0..2).for_each(|rank| touch(&shard_name(step, rank, 2)));
    }
    // never finished; the last one may be in the making
    touch(&shard_name(25, 1, 2));
    touch(&shard_name(40, 1, 2));
    touch("step-000000020-1-of-2.safetensors");
    assert_eq!(shard_step(OsStr::new("step-000000020-1-of-2.safetensors")), None, "not ours");
    assert_eq!(shard_step(OsStr::new(&shard_name(20, 1, 2))), Some(20));
    run.store().expect("store").prune(2).expect("prune");
    let two = ["0020-00000-of-00002", "0020-00001-of-00002", "0020-1-of-2", "0020"];
    let three = ["0030-00000-of-00002", "0030-00001-of-00002", "0030"];
    assert_eq!(there(), [&two[..], &three, &["0040-00001-of-00002"]].concat());
    run.rewind(&Config::default(), 20, 0).expect("rewind");
    assert_eq!(there(), two);
    run.begin(&Config::default()).expect("begin");
    assert_eq!(there(), ["0020-1-of-2"]);
}
