//! A planted fault is found by the demo's own check.
#![cfg(feature = "planted-faults")]

mod common;

use common::demo;
use serde_json::Value;

/// Found: exit code 1, and the first violation is named with its place.
fn found(fault: &str, arguments: &[&str]) -> Value {
    let ended = demo(&[&["--json", "--plant", fault], arguments].concat());
    let json = ended.json();
    assert_eq!(ended.code, Some(1), "{fault}: {json}\n{}", ended.stderr);
    let violation = &json["first_violation"];
    let place = format!("partition {}, offset {}: ", violation["partition"], violation["offset"]);
    assert!(ended.stderr.contains(&place), "{fault}: no {place:?} in {}", ended.stderr);
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    json
}

#[test]
fn a_commit_too_far_is_found() {
    // The second of two slow records is unfinished for so long that the acknowledgement of a commit past it cannot
    // come too late to tell.
    let slow = ["--partitions", "1", "--workers", "1", "--records", "2", "--handler-us", "1200000"];
    let json = found("commit-too-far", &slow);
    let violation = &json["first_violation"];
    assert_eq!(
        (&violation["kind"], &violation["offset"]),
        (&"watermark".into(), &1.into()),
        "{json}"
    );
    assert_eq!(json["lost"], 0, "{json}");
}

#[test]
fn a_swapped_key_is_found() {
    let json = found("swap-key", &[]);
    assert_eq!(json["first_violation"]["kind"], "order", "{json}");
    assert!(json["order_violations"].as_u64() > Some(0), "{json}");
    assert_eq!(json["lost"], 0, "{json}");
}

#[test]
fn a_dropped_ticket_is_found() {
    for batch in [&[][..], &["--batch", "16"]] {
        let json = found("drop-ticket", batch);
        assert!(json["lost"].as_u64() > Some(0), "{json}");
    }
}

#[test]
fn without_a_fault_nothing_is_found() {
    let ended = demo(&[]);
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.stdout, ended.stderr);
}
