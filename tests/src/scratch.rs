//! A folder of one test, with the files that commands need.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::program::Program;

/// A folder that goes with the test, and the program that works in it.
#[derive(Debug)]
pub struct Scratch {
    folder: TempDir,
    program: Program,
}

impl Scratch {
    /// An empty folder.
    pub fn new(program: Program) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        Self { folder, program }
    }

    /// An empty folder with a made model in `model`, by the given flags of `model make`.
    pub fn with_model(program: Program, flags: &[&str]) -> Self {
        let scratch = Self::new(program);
        scratch
            .run(&[&["model", "make", "-o", "model"], flags].concat())
            .done();
        scratch
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Runs a command here.
    pub fn run(&self, arguments: &[&str]) -> crate::program::Answer {
        self.program.run(self.path(), arguments)
    }

    /// Runs a command here that is written as in a shell; none of its words may hold a space.
    pub fn call(&self, line: &str) -> crate::program::Answer {
        self.run(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Makes a layout of the made model, by the given flags of `layout make`.
    pub fn layout(&self, name: &str, flags: &str) {
        self.call(&format!("layout make --model-dir model -o {name} {flags}"))
            .done();
    }

    /// Writes a file here.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, content).expect("a scratch file can be written");
        path
    }

    /// Reads a JSON file of this folder, changes it and writes it under another name.
    pub fn change(&self, from: &str, to: &str, change: impl FnOnce(&mut Value)) {
        let text = std::fs::read_to_string(self.path().join(from)).expect("a scratch file can be read");
        let mut value = serde_json::from_str(&text).expect("the file is JSON");
        change(&mut value);
        self.write(to, value.to_string());
    }
}
