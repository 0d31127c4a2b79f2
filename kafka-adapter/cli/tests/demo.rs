//! The demo on the embedded broker, as a user runs it.

mod common;

use common::{assert_kept, demo, end, start};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// A file in a folder that goes with the test.
fn file(name: &str, content: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    (folder, path)
}

/// 40 rows of 4 keys; the third has an embedded line break, the fourth no key.
fn rows() -> String {
    let mut text = String::from("id,key,note\n");
    for row in 0..10 {
        text.push_str(&format!(
            "{row},a,plain\n{row},b,plain\n{row},c,\"two\nlines\"\n{row},,none\n"
        ));
    }
    text
}

#[test]
fn the_default_demo_keeps_every_promise() {
    let ended = demo(&["--json"]);
    assert_kept(&ended, 27_004);
    assert!(ended.json()["max_above_watermark"].as_u64().unwrap() > 100, "{}", ended.stdout);
}

#[test]
fn the_table_names_the_verdict() {
    let ended = demo(&["--records", "500"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for word in ["records", "verdict", "ok", "classic design"] {
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
    for (name, content) in [
        ("own.csv", text.clone().into_bytes()),
        ("own.csv.gz", gz.finish().unwrap()),
        ("own.csv.xz", xz.finish().unwrap()),
    ] {
        let (_folder, path) = file(name, &content);
        let path = path.to_str().unwrap();
        assert_kept(&demo(&["--json", "--input", path, "--key", "key"]), 40);
    }
    let (_folder, path) = file("own.csv", text.as_bytes());
    let path = path.to_str().unwrap();
    for records in ["7", "333"] {
        let ended = demo(&["--json", "--input", path, "--key", "key", "--records", records]);
        assert_kept(&ended, records.parse().unwrap());
    }
}

#[test]
fn bad_input_is_named() {
    let (_folder, good) = file("good.csv", rows().as_bytes());
    let good = good.to_str().unwrap();
    demo(&["--input", "/no/such/file.csv", "--key", "key"]).assert_refused(&["/no/such/file.csv"]);
    demo(&["--input", good, "--key", "colour"]).assert_refused(&["colour", "note"]);
    let (_folder, ragged) = file("ragged.csv", b"id,key\n1,a\n2,b\n3\n4,d\n");
    let ragged = ragged.to_str().unwrap();
    demo(&["--input", ragged, "--key", "key"]).assert_refused(&["ragged.csv", "4"]);
    let (_folder, empty) = file("empty.csv", b"id,key\n");
    let empty = empty.to_str().unwrap();
    demo(&["--input", empty, "--key", "key"]).assert_refused(&["empty.csv"]);
    let (_folder, gz) = file("broken.csv.gz", b"not gzip at all");
    let gz = gz.to_str().unwrap();
    demo(&["--input", gz, "--key", "key"]).assert_refused(&["broken.csv.gz"]);
    for setting in ["--batch", "--window", "--workers", "--records", "--partitions"] {
        demo(&[setting, "0"]).assert_refused(&[setting]);
    }
    demo(&["--no-such-flag"]).assert_refused(&["--no-such-flag"]);
    end(start(&["no-such-command"])).assert_refused(&["no-such-command"]);
}

#[test]
fn an_unreachable_broker_is_named() {
    // A port that was free a moment ago: nobody listens.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let broker = format!("127.0.0.1:{port}");
    demo(&["--json", "--brokers", &broker]).assert_refused(&[&broker]);
}

#[test]
fn a_signal_drains_it() {
    let child = start(&["demo", "--json", "--records", "5000000"]);
    std::thread::sleep(Duration::from_secs(3));
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().unwrap().success());
    let ended = end(child);
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.stdout, ended.stderr);
    let json = ended.json();
    assert_eq!(json["order_violations"], 0, "{json}");
    assert!(json["handled"].as_u64().unwrap() < 5_000_000, "{json}");
}
