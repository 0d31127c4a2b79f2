//! A planted fault is found by the demo's own check.
#![cfg(feature = "planted-faults")]

mod common;

use common::demo;

fn found(fault: &str) {
    let ended = demo(&["--plant", fault]);
    assert_eq!(ended.code, Some(1), "{fault}: {}\n{}", ended.stdout, ended.stderr);
    for word in ["partition", "offset"] {
        assert!(ended.stderr.contains(word), "{fault}: no {word} named: {}", ended.stderr);
    }
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
}

#[test]
fn a_commit_too_far_is_found() {
    found("commit-too-far");
}

#[test]
fn a_swapped_key_is_found() {
    found("swap-key");
}

#[test]
fn a_dropped_ticket_is_found() {
    found("drop-ticket");
}

#[test]
fn without_a_fault_nothing_is_found() {
    let ended = demo(&[]);
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.stdout, ended.stderr);
}
