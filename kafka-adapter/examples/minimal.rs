//! The smallest service: prints every record, on all cores, in order per key.

use plimsoll_kafka::{Consumer, Record};

fn main() -> Result<(), plimsoll_kafka::Error> {
    let consumer = Consumer::builder()
        .brokers("localhost:9092")
        .group("billing")
        .topic("orders")
        .each(|record: &Record| println!("{:?}", record.payload()))
        .build()?;
    consumer.run()?; // until SIGINT or SIGTERM
    Ok(())
}
