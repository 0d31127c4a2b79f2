//! The demo on the embedded broker, as a user runs it.

mod common;

use common::{Ended, assert_kept, demo, end, start};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::Duration;

/// A file in a folder that goes with the test.
fn file(name: &str, content: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    (folder, path)
}

/// The demo over a file.
fn demo_of(path: &Path, arguments: &[&str]) -> Ended {
    demo(&[&["--json", "--input", path.to_str().unwrap()], arguments].concat())
}

/// 40 rows of 3 keys and none; every third has an embedded line break, some end like on Windows.
fn rows() -> String {
    let mut text = String::from("id,key,\"a, note\"\n");
    for row in 0..10 {
        text.push_str(&format!(
            "{row},a,plain\r\n{row},b,\"say \"\"b\"\"\"\n{row},c,\"two\nlines\"\n{row},,none\n"
        ));
    }
    text
}

#[test]
fn the_default_demo_keeps_every_promise() {
    let ended = demo(&["--json"]);
    assert_kept(&ended, 27_004);
    let json = ended.json();
    assert!(json["max_above_watermark"].as_u64().unwrap() > 100, "{json}");
    // One process, no rebalance: nothing is handed out again.
    assert_eq!(json["duplicates"], 0, "{json}");
    assert_eq!(ended.stderr, "", "no progress line without a terminal");
}

#[test]
fn the_table_tells_figures_and_verdict() {
    let ended = demo(&["--records", "3000"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let row = |name: &str| {
        let line = ended.stdout.lines().find(|line| line.trim_start().starts_with(name));
        line.unwrap_or_else(|| panic!("{name}: {}", ended.stdout))
            .split_once(name)
            .unwrap()
            .1
            .trim()
    };
    assert!(row("records ").starts_with("3,000, 3,000 handled, in "), "{}", ended.stdout);
    assert_eq!(row("lost, duplicates"), "0, 0");
    assert_eq!(row("order violations"), "0");
    assert_eq!(row("final lag"), "0");
    assert_eq!(row("verdict"), "ok");
    for name in ["append to handler", "handler to committed"] {
        let row = row(name);
        assert!(["p50 ", "p99 ", "p99.9 ", "max "].iter().all(|part| row.contains(part)), "{row}");
    }
    for word in ["classic design", "scoreboard"] {
        assert!(ended.stdout.contains(word), "{word}: {}", ended.stdout);
    }
}

#[test]
fn own_input_plain_and_compressed() {
    let text = rows();
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(text.as_bytes()).unwrap();
    let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 1);
    xz.write_all(text.as_bytes()).unwrap();
    for (name, content, key) in [
        ("own.csv", text.clone().into_bytes(), "key"),
        ("own.csv.gz", gz.finish().unwrap(), "id"),
        ("own.csv.xz", xz.finish().unwrap(), "a, note"),
    ] {
        let (_folder, path) = file(name, &content);
        assert_kept(&demo_of(&path, &["--key", key]), 40);
    }
    let (_folder, path) = file("own.csv", text.as_bytes());
    for records in ["7", "333"] {
        let ended = demo_of(&path, &["--key", "key", "--records", records]);
        assert_kept(&ended, records.parse().unwrap());
    }
}

#[test]
fn every_setting_at_its_edge_keeps_every_promise() {
    let one = ["--workers", "1", "--batch", "1", "--window", "1", "--partitions", "1"];
    let many = ["--workers", "64", "--batch", "4096", "--window", "1000000", "--partitions", "40"];
    let others = ["--batch", "100", "--handler-us", "0..500", "--seed", "7"];
    let one_key = ["--key", "year", "--handler-us", "0"];
    for settings in [&one[..], &many, &others, &one_key] {
        assert_kept(&demo(&[&["--json", "--records", "300"], settings].concat()), 300);
    }
}

#[test]
fn bad_input_is_named() {
    demo(&["--input", "/no/such/file.csv", "--key", "key"]).assert_refused(&["/no/such/file.csv"]);
    let folder = tempfile::tempdir().unwrap();
    demo_of(folder.path(), &["--key", "key"]).assert_refused(&[folder.path().to_str().unwrap()]);
    for (name, content, named) in [
        ("good.csv", &b"id,colour\n1,a\n"[..], &["good.csv", "`key`", "id, colour"][..]),
        ("ragged.csv", b"id,key\n1,a\n2,b\n3\n4,d\n", &["ragged.csv, line 4", "1 fields", "has 2"]),
        ("quote.csv", b"id,key\n1,a\n2,\"b\n3,c\n", &["quote.csv, line 3", "not closed"]),
        ("rows.csv", b"id,key\n", &["rows.csv", "no records"]),
        ("empty.csv", b"", &["empty.csv is empty"]),
        ("broken.csv.gz", b"id,key\n1,a\n", &["broken.csv.gz is not a valid gzip file"]),
        ("broken.csv.xz", b"id,key\n1,a\n", &["broken.csv.xz is not a valid xz file"]),
    ] {
        let (_folder, path) = file(name, content);
        demo_of(&path, &["--key", "key"]).assert_refused(named);
    }
    let (_folder, path) = file("good.csv", b"id,colour\n1,a\n");
    demo_of(&path, &[]).assert_refused(&["`tailnum`", "id, colour"]);
    demo(&["--key", "tail"]).assert_refused(&["`tail`", "dest, air_time"]);
}

#[test]
fn bad_settings_are_named() {
    let settings = ["--batch", "--window", "--workers", "--records", "--partitions", "--patience"];
    for setting in settings {
        demo(&[setting, "0"]).assert_refused(&[setting, "0 is not in 1.."]);
        demo(&[setting, "few"]).assert_refused(&[setting, "few"]);
        demo(&[setting, "99999999999999999999"]).assert_refused(&[setting]);
    }
    demo(&["--handler-us", "9..1"]).assert_refused(&["--handler-us", "9..1"]);
    demo(&["--brokers", "here:there"]).assert_refused(&["--brokers", "here:there"]);
    demo(&["--brokers", ""]).assert_refused(&["--brokers"]);
    demo(&["--no-such-flag"]).assert_refused(&["--no-such-flag"]);
    end(start(&["no-such-command"])).assert_refused(&["no-such-command"]);
}

#[test]
fn an_unreachable_broker_is_named() {
    // A port that was free a moment ago: nobody listens.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let broker = format!("127.0.0.1:{port}");
    let ended = demo(&["--json", "--brokers", &broker]);
    ended.assert_refused(&[&broker]);
    assert!(ended.took < Duration::from_secs(12), "{:?}", ended.took);
}

#[test]
fn a_watermark_that_stands_still_is_named_and_does_not_hang_the_demo() {
    // Handlers that outlast any patience.
    let ended = demo(&["--json", "--records", "50", "--handler-us", "60000000", "--patience", "1"]);
    let json = ended.json();
    assert_eq!(ended.code, Some(1), "{json}\n{}", ended.stderr);
    let violation = &json["first_violation"];
    assert_eq!(
        (&violation["kind"], &violation["offset"]),
        (&"stalled".into(), &0.into()),
        "{json}"
    );
    let place = format!("partition {}, offset 0: ", violation["partition"]);
    assert!(ended.stderr.contains(&place), "{}", ended.stderr);
    assert_eq!((&json["ok"], &json["lost"]), (&false.into(), &0.into()), "{json}");
    assert!(ended.took < Duration::from_secs(30), "{:?}", ended.took);
}

fn signal(child: &Child, name: &str) {
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
}

#[test]
fn a_signal_drains_it() {
    for name in ["INT", "TERM"] {
        let child = start(&["demo", "--json", "--records", "5000000", "--handler-us", "0..200"]);
        thread::sleep(Duration::from_secs(2));
        signal(&child, name);
        let ended = end(child);
        let json = ended.json();
        assert_eq!(ended.code, Some(0), "{json}\n{}", ended.stderr);
        assert_eq!((&json["ok"], &json["interrupted"]), (&true.into(), &true.into()), "{json}");
        assert_eq!((&json["lost"], &json["order_violations"]), (&0.into(), &0.into()), "{json}");
        let handled = json["handled"].as_u64().unwrap();
        assert!((1..5_000_000).contains(&handled), "{json}");
        // Drained and committed: what is left was appended and never handed out.
        let left = json["records"].as_u64().unwrap() - handled;
        assert_eq!(json["final_lag"], left, "{json}");
    }
}

#[test]
fn a_second_signal_does_not_wait_for_handlers() {
    let child = start(&["demo", "--json", "--records", "8", "--handler-us", "60000000"]);
    thread::sleep(Duration::from_secs(2));
    signal(&child, "INT");
    thread::sleep(Duration::from_millis(500));
    signal(&child, "INT");
    let ended = end(child);
    let json = ended.json();
    assert_eq!(ended.code, Some(0), "{json}\n{}", ended.stderr);
    assert_eq!((&json["handled"], &json["final_lag"]), (&0.into(), &8.into()), "{json}");
    assert!(ended.took < Duration::from_secs(4), "{:?}", ended.took);
}

#[cfg(target_os = "linux")]
#[test]
fn a_result_that_cannot_be_written_is_an_error() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    let output = command.args(["demo", "--records", "10"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write the result"));
}
