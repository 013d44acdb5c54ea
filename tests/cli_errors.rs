//! The program from outside: exit codes, one line an error, nothing on stdout but results.

use std::process::{Command, Output, Stdio};

fn birkhoff(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
    command.args(args).stdin(Stdio::null()).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn usage_errors_exit_with_2_and_leave_stdout_empty() {
    for args in
        [&["fly"][..], &["eval"], &["train", "--train", "a"], &["synth", "--rows", "x", "--out", "f"], &[]]
    {
        let output = birkhoff(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{args:?}");
    }
    let line = |args: &[&str]| text(&birkhoff(args).stderr);
    assert_eq!(
        line(&["train", "--train", "a", "--valid", "b"]),
        "error: the following required arguments were not provided: --out <RUN>; see --help\n"
    );
    let misspelt = line(&["eval", "run", "--dat", "f"]);
    assert!(misspelt.contains("--data") && misspelt.trim_end().lines().count() == 1, "{misspelt}");
}

#[test]
fn help_and_version_go_to_stdout() {
    for args in [&["--help"][..], &["train", "--help"], &["--version"]] {
        let output = birkhoff(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{args:?}");
    }
    let help = text(&birkhoff(&["train", "--help"]).stdout);
    for option in ["--train", "--valid", "--format", "--out", "--config", "--set", "--on-bad-row", "--force"]
    {
        assert!(help.contains(option), "{option} is not in the help");
    }
}

#[test]
fn bad_configurations_are_one_line_with_code_2() {
    let dir = tempfile::tempdir().expect("temp dir");
    let config = dir.path().join("c.toml");
    std::fs::write(&config, "[model]\nlayers = 2\nwidht = 8\n").expect("write");
    let config = config.to_string_lossy().into_owned();
    let out = dir.path().join("run").to_string_lossy().into_owned();
    let train = ["train", "--train", "no-such.tsv", "--valid", "no-such.tsv", "--out", &out];
    for (more, words) in [
        (["--config", &config], "c.toml:3: unknown key `model.widht`; did you mean `model.width`?"),
        (["--set", "model.modules[0].heads=3"], "does not divide model.width = 16; use 1, 2, 4, 8 or 16"),
    ] {
        let output = birkhoff(&[&train[..], &more].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(output.stdout.is_empty());
        assert!(stderr.starts_with("error: ") && stderr.trim_end().lines().count() == 1, "{stderr}");
        assert!(stderr.contains(words), "{stderr}");
        assert!(!std::path::Path::new(&out).join("summary.json").exists());
    }
}
