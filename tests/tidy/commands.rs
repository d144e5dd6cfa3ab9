//! Commands of the documents and of the help texts parse: a renamed flag must not leave a stale example.

use clap::{Command, CommandFactory as _, Parser as _};
use infercluster_experiments::cli::Cli;

use crate::sources::sources;

#[test]
fn commands_of_the_documents_parse() {
    let mut count = 0;
    for source in sources().iter().filter(|source| source.path.ends_with(".md")) {
        for command in commands(&source.text) {
            check_parses(&source.path, &command);
            count += 1;
        }
    }
    assert!(count >= 3, "only {count} commands found: is the README there?");
}

#[test]
fn every_command_explains_itself_with_an_example() {
    let mut root = Cli::command();
    root.build();
    for command in leaves(&root) {
        let name = command
            .get_bin_name()
            .unwrap_or_else(|| command.get_name())
            .to_owned();
        assert!(
            command.get_about().is_some(),
            "`{name}` says nothing about itself"
        );
        for argument in command.get_arguments() {
            assert!(
                argument.get_help().is_some(),
                "`{name}`: {argument} is not explained"
            );
        }
        let help = command
            .get_after_help()
            .map(ToString::to_string)
            .unwrap_or_default();
        let examples: Vec<&str> = help
            .lines()
            .map(|line| line.trim_start_matches("Example:").trim())
            .filter(|line| line.starts_with("infercluster "))
            .collect();
        assert!(!examples.is_empty(), "`{name}` has no example");
        for example in examples {
            assert!(
                example.starts_with(&name),
                "`{name}` has an example of another command: {example}"
            );
            check_parses(&format!("help of `{name}`"), example);
        }
    }
}

/// Commands without commands of their own, the built-in help left out.
fn leaves(command: &Command) -> Vec<&Command> {
    let mut subcommands = command.get_subcommands().peekable();
    if subcommands.peek().is_none() {
        return vec![command];
    }
    subcommands
        .filter(|inner| inner.get_name() != "help" && !inner.is_hide_set())
        .flat_map(leaves)
        .collect()
}

#[track_caller]
fn check_parses(place: &str, command: &str) {
    if let Err(error) = Cli::try_parse_from(words(command))
        && error.use_stderr()
    {
        panic!("{place}: `{command}` does not parse: {error}");
    }
}

/// Calls of the program inside code blocks, continued lines joined, the program's name first.
fn commands(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let mut is_code = false;
    let mut found = Vec::new();
    for line in joined.lines() {
        let line = line.trim();
        if line.starts_with("```") {
            is_code = !is_code;
        } else if is_code {
            let call = line.strip_prefix("$ ").unwrap_or(line);
            let call = call.split(" #").next().unwrap_or(call).trim();
            if let Some(arguments) = call.strip_prefix("cargo run --release -- ") {
                found.push(format!("infercluster {arguments}"));
            } else if call.starts_with("infercluster ") {
                found.push(call.to_owned());
            }
        }
    }
    found
}

/// Words as a shell cuts them, as far as the documents use it: double quotes, pipes and redirections end it.
fn words(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut is_quoted = false;
    for letter in command.chars() {
        match letter {
            '"' => is_quoted = !is_quoted,
            '|' | '>' | '&' | ';' if !is_quoted => break,
            ' ' if !is_quoted => words.push(String::new()),
            other => words.last_mut().expect("there is a word").push(other),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

#[test]
fn commands_are_found_in_code_blocks_only() {
    let text = "infercluster no\n```\n$ infercluster a --b \\\n  \"c d\" # why\ncargo run --release -- e | head\nls\n```\n";
    let found = commands(text);
    assert_eq!(found.len(), 2);
    assert_eq!(words(&found[0]), ["infercluster", "a", "--b", "c d"]);
    assert_eq!(words(&found[1]), ["infercluster", "e"]);
}
