//! A small service that writes down what it handled: one line per record, appended by one write, so
//! that the file tells what took effect even if the process is killed.
//!
//! It runs in a process of its own: this test program, called as
//! `real_kafka recorder BROKERS GROUP TOPIC FILE MICROSECONDS [PROPERTY=VALUE ...]`.
//! Each record takes up to `MICROSECONDS` of time, depending on its offset. `ready` is printed when
//! partitions were assigned. SIGINT and SIGTERM drain it.

use plimsoll_kafka::{Consumer, Event, Record};
use std::io::Write;
use std::time::Duration;

pub(crate) fn main(arguments: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [brokers, group, topic, file, time, properties @ ..] = arguments else {
        return Err("BROKERS GROUP TOPIC FILE MICROSECONDS [PROPERTY=VALUE ...]".into());
    };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
    let most: u64 = time.parse()?;
    let mut builder = Consumer::builder()
        .brokers(brokers)
        .group(group)
        .topic(topic)
        .workers(4)
        .commit_interval(Duration::from_millis(100))
        .on_event(|event| match event {
            Event::Assigned { .. } => println!("ready"),
            Event::Committed { .. } => {}
            other => eprintln!("{other:?}"),
        });
    for property in properties {
        let (name, value) = property.split_once('=').ok_or("a property is NAME=VALUE")?;
        builder = builder.set(name, value);
    }
    let consumer = builder
        .each(move |record: &Record| {
            let spread = record.offset().unsigned_abs().wrapping_mul(0x9e37_79b9) >> 7;
            if most > 0 {
                std::thread::sleep(Duration::from_micros(spread % most));
            }
            let key = String::from_utf8_lossy(record.key().unwrap_or(b"-"));
            let line = format!("{} {} {key}\n", record.partition(), record.offset());
            // One write, so that lines of several processes do not mix and none is torn.
            (&file).write_all(line.as_bytes())
        })
        .build()?;
    let report = consumer.run()?;
    eprintln!("{report:?}");
    Ok(())
}
