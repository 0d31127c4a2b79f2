//! The command line of the scoreboard.

use std::process::{Command, Output};

use plimsoll_benches::figures::REGISTRY;
use serde_json::Value;

fn scoreboard(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_scoreboard"))
        .args(arguments)
        .output()
        .expect("the scoreboard starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("output is UTF-8")
}

const CONTEXT: &str = "context.channel_per_worker_vs_classic";

#[test]
fn wrong_usage_exits_with_2_and_names_the_thing() {
    for (arguments, thing) in [
        (&["--fast"][..], "--fast"),
        (&["--only", "engine.no_such"], "engine.no_such"),
        (&["--only", "context", "--only", "typo"], "typo"),
        (&["--rounds", "0"], "0"),
        (&["--rounds", "many"], "many"),
        (&["stray"], "stray"),
    ] {
        let output = scoreboard(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        let message = text(&output.stderr);
        assert!(message.contains(thing), "{arguments:?}: {message}");
    }
}

#[test]
fn list_names_every_figure() {
    let output = scoreboard(&["--list"]);
    assert_eq!(output.status.code(), Some(0));
    let list = text(&output.stdout);
    assert_eq!(list.lines().count(), REGISTRY.len() + 1);
    for figure in REGISTRY {
        assert!(list.contains(figure.name), "{list}");
    }
}

#[test]
fn json_is_one_object_a_line_and_nothing_else() {
    let output = scoreboard(&["--json", "--rounds", "1", "--only", CONTEXT]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    let value: Value = serde_json::from_str(lines[0]).expect("a JSON object");
    assert_eq!(value["figure"], CONTEXT);
    assert_eq!(value["unit"], "ratio");
    assert!(value["value"].as_f64().is_some_and(|value| value > 0.0));
    assert_eq!(value.as_object().map(serde_json::Map::len), Some(3));
    let messages = text(&output.stderr);
    assert!(messages.contains("keys"), "{messages}");
    assert!(messages.contains("line hop") || messages.contains("one core"));
}

#[test]
fn allocations_are_counted() {
    let names = ["engine.allocs_per_record", "engine.window_bytes_per_slot"];
    let only = names.iter().flat_map(|name| ["--only", name]);
    let output = scoreboard(&[&["--json"][..], &only.collect::<Vec<_>>()].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let values: Vec<Value> = text(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON object"))
        .collect();
    let value = |index: usize| values[index]["value"].as_f64().expect("a number");
    assert_eq!(values.len(), 2, "{values:?}");
    assert!(value(0) >= 0.0);
    // A slot has at least its flag, which a count that sees nothing would miss.
    assert!(value(1) >= 1.0, "{values:?}");
}

#[test]
fn table_shows_value_aim_and_conditions() {
    let output = scoreboard(&["--rounds", "1", "--only", "context"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    let head = table.lines().next().unwrap_or_default();
    let columns: Vec<&str> = head.split_whitespace().collect();
    assert_eq!(columns, ["figure", "value", "unit", "aim", "verdict", "note"]);
    assert!(table.contains(CONTEXT) && table.contains("median of 1 pairs"));
}
