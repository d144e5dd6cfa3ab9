//! `fuzz`: readers under changed input.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;
use infercluster_spec::Bytes;
use serde::Serialize;

use crate::failure::WithFix as _;
use crate::fuzzing::{self, Fault, MEMORY_LIMIT, READERS, Reader, Tally};
use crate::screen::{Columns, Screen};
use crate::{Outcome, io};

/// Largest input of a corpus; larger files are cut to it.
const INPUT_LIMIT: usize = 1 << 20;
/// Most inputs of a corpus.
const INPUTS_LIMIT: usize = 10_000;

/// Tries readers of files with changed input, and demands an answer each time.
///
/// Good inputs are flipped, cut, spliced and filled with words that mean something; a run fails where the
/// reader panics, holds more than 64 MiB beside the size of the input, or takes ten seconds. Inputs that
/// failed are written to a folder, with the command that reads each again. The same seed makes the same runs.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    infercluster fuzz all --runs 100000\n  \
    infercluster fuzz gguf --runs 10000000 --seed 7\n  \
    infercluster fuzz topology --corpus dumps")]
pub(crate) struct Fuzz {
    /// Which reader: topology, config, gguf, safetensors, trace, clients, cluster-file, catalogue, document,
    /// results, or all.
    reader: String,
    /// Changed inputs for each reader.
    #[arg(long, default_value_t = 100_000)]
    runs: u64,
    /// Seed of the changes.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A folder with more good inputs, its own files only.
    #[arg(long)]
    corpus: Option<PathBuf>,
    /// Read this one input as it is.
    #[arg(long, conflicts_with_all = ["runs", "seed", "corpus"])]
    input: Option<PathBuf>,
    /// Where inputs that failed are written.
    #[arg(short, long, default_value = "out/fuzz")]
    output: PathBuf,
}

#[derive(Debug, Serialize)]
struct Answer {
    reader: &'static str,
    seed: u64,
    runs: u64,
    accepted: u64,
    seconds: f64,
    runs_per_s: f64,
    most_held_bytes: u64,
    failed_runs: u64,
    failures: Vec<Failure>,
}

#[derive(Debug, Serialize)]
struct Failure {
    fault: Fault,
    input: String,
    /// Reads the input again.
    command: String,
}

/// Runs the command.
pub(crate) fn run(arguments: &Fuzz, screen: &Screen) -> anyhow::Result<Outcome> {
    let readers = chosen(&arguments.reader)?;
    if let Some(input) = &arguments.input {
        return one_input(&readers, input, screen);
    }
    let corpus = match &arguments.corpus {
        Some(folder) => corpus(folder)?,
        None => Vec::new(),
    };
    let mut answers = Vec::new();
    for reader in readers {
        let bar = screen.progress(arguments.runs, reader.name);
        let start = Instant::now();
        let tally = fuzzing::run(reader, &corpus, arguments.seed, arguments.runs, |more| {
            bar.inc(more)
        });
        let seconds = start.elapsed().as_secs_f64();
        bar.finish_and_clear();
        answers.push(answer(arguments, reader, tally, seconds)?);
    }
    screen.answer(&answers, |answers| people(answers))?;
    let failed = answers.iter().any(|answer| answer.failed_runs > 0);
    Ok(if failed {
        Outcome::GoalNotMet
    } else {
        Outcome::Done
    })
}

fn chosen(name: &str) -> anyhow::Result<Vec<&'static Reader>> {
    let readers: Vec<&Reader> = READERS
        .iter()
        .filter(|reader| name == "all" || reader.name == name)
        .collect();
    if readers.is_empty() {
        let names: Vec<&str> = READERS.iter().map(|reader| reader.name).collect();
        bail!("`{name}` is no reader, known are {} and all", names.join(", "));
    }
    Ok(readers)
}

/// The files of a folder, folders inside left out.
fn corpus(folder: &Path) -> anyhow::Result<Vec<Vec<u8>>> {
    let entries = std::fs::read_dir(folder)
        .with_context(|| folder.display().to_string())
        .fix("name a folder with files that readers take")?;
    let mut paths = Vec::new();
    for entry in entries {
        paths.push(entry?.path());
    }
    paths.sort();
    let files = paths.iter().filter(|path| path.is_file()).take(INPUTS_LIMIT);
    let mut inputs = Vec::new();
    for path in files {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut std::io::Read::take(file, INPUT_LIMIT as u64), &mut bytes)?;
        inputs.push(bytes);
    }
    Ok(inputs)
}

fn one_input(readers: &[&Reader], input: &Path, screen: &Screen) -> anyhow::Result<Outcome> {
    let bytes = std::fs::read(input).with_context(|| input.display().to_string())?;
    let mut outcome = Outcome::Done;
    for reader in readers {
        let verdict = fuzzing::replay(reader, &bytes);
        let answer = match (verdict.fault, verdict.accepted) {
            (Some(fault), _) => {
                outcome = Outcome::GoalNotMet;
                format!("failed ({fault:?})")
            }
            (None, true) => "accepted".to_owned(),
            (None, false) => "refused".to_owned(),
        };
        screen.out(format!(
            "{}: {answer}, {} held",
            reader.name,
            Bytes(verdict.most_held)
        ))?;
    }
    Ok(outcome)
}

fn answer(arguments: &Fuzz, reader: &Reader, tally: Tally, seconds: f64) -> anyhow::Result<Answer> {
    let mut failures = Vec::new();
    for (number, (fault, bytes)) in tally.faults.iter().enumerate() {
        std::fs::create_dir_all(&arguments.output).with_context(|| arguments.output.display().to_string())?;
        let name = format!("{}-{}-{number}.input", reader.name, arguments.seed);
        let path = arguments.output.join(name);
        io::write_bytes(&path, bytes)?;
        let input = path.display().to_string();
        failures.push(Failure {
            fault: *fault,
            command: format!("infercluster fuzz {} --input {input}", reader.name),
            input,
        });
    }
    Ok(Answer {
        reader: reader.name,
        seed: arguments.seed,
        runs: tally.runs,
        accepted: tally.accepted,
        seconds,
        runs_per_s: if seconds > 0.0 {
            tally.runs as f64 / seconds
        } else {
            0.0
        },
        most_held_bytes: tally.most_held,
        failed_runs: tally.fault_runs,
        failures,
    })
}

fn people(answers: &[Answer]) -> String {
    let mut table = Columns::new(["reader", ">runs", ">accepted", ">runs/s", ">most held", ">failed"]);
    for answer in answers {
        table.row([
            answer.reader.to_owned(),
            answer.runs.to_string(),
            answer.accepted.to_string(),
            format!("{:.0}", answer.runs_per_s),
            Bytes(answer.most_held_bytes).to_string(),
            answer.failed_runs.to_string(),
        ]);
    }
    let mut text = table.to_string();
    for failure in answers.iter().flat_map(|answer| &answer.failures) {
        text.push_str(&format!("\n{:?}: {}", failure.fault, failure.command));
    }
    text.push_str(&format!("\nlimit: {MEMORY_LIMIT} beside the size of the input\n"));
    text
}
