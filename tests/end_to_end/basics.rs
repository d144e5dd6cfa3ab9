//! What every command keeps: exit codes, where text goes, pipes.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use infercluster_tests::program::Answer;

use crate::program;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../sim/spec/examples/model.json");

#[test]
fn help_is_a_result_and_a_wrong_word_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let help = program().run(folder.path(), &["--help"]).done();
    assert!(help.stdout.contains("doctor"), "{help}");
    program()
        .run(folder.path(), &["modle"])
        .refused(&["unrecognized subcommand 'modle'"]);
}

#[test]
fn a_missing_file_is_named_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    program()
        .run(folder.path(), &["model", "show", "absent.json"])
        .refused(&["absent.json", "No such file", "fix: "]);
    program()
        .run(folder.path(), &["layout", "show", "."])
        .refused(&["is a directory"]);
}

#[test]
fn standard_input_is_a_file() {
    let mut command = program().command(["model", "show", "-", "--json"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let model = std::fs::read(MODEL).unwrap();
    child.stdin.take().unwrap().write_all(&model).unwrap();
    let answer = Answer::of(&command, &child.wait_with_output().unwrap()).done();
    // By hand, from the published shapes of Llama 3.1 8B.
    assert_eq!(answer.json()["params"], 8_030_261_248_u64);
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    // The pipe is closed before the program writes, so that its first write fails.
    let mut command = program().command(["model", "show", "-"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let model = std::fs::read(MODEL).unwrap();
    child.stdin.take().unwrap().write_all(&model).unwrap();
    let mut talk = String::new();
    BufReader::new(child.stderr.take().unwrap())
        .read_line(&mut talk)
        .unwrap();
    assert_eq!((child.wait().unwrap().code(), talk.as_str()), (Some(0), ""));
}

#[test]
fn doctor_answers_the_same_in_both_forms() {
    let folder = tempfile::tempdir().unwrap();
    let answer = program().run(folder.path(), &["doctor", "--json"]).done();
    let checks = answer.json()["checks"].as_array().unwrap().clone();
    let table = program().run(folder.path(), &["doctor"]).done().stdout;
    assert_eq!(table.lines().count(), checks.len() + 1);
    for check in checks {
        assert!(table.contains(check["what"].as_str().unwrap()));
        assert_eq!(check["verdict"] == "good", check["fix"].is_null());
    }
}
