use std::net::TcpListener;

use dray_core::FileId;
use dray_layers::audit::{AuditKind, AuditRecord};

use super::test_broker::{Mishap, TOPIC, TestBroker, partitions_by_key};
use super::*;

fn records(indexes: std::ops::Range<u64>) -> Vec<AuditRecord> {
    let of = |index| AuditRecord {
        index,
        id: Some(FileId { ino: index % 10, generation: 1 }),
        ..AuditRecord::new(AuditKind::Close, 1_709_208_000_000_123 + index * 1000)
    };
    indexes.map(of).collect()
}

fn connect(broker: &TestBroker) -> KafkaSink {
    KafkaSink::connect(&broker.address().parse().unwrap(), "home".into()).unwrap()
}

#[test]
fn addresses_are_read_and_what_is_wrong_is_said() {
    let address: KafkaAddress = "kafka://one:9092,[::1]:9093/dray.audit".parse().unwrap();
    assert_eq!((address.brokers.len(), address.topic.as_str()), (2, "dray.audit"));
    for (text, words) in [
        ("one:9092/audit", "kafka://HOST:PORT"),
        ("kafka://one/audit", "kafka://HOST:PORT"),
        ("kafka://one:9092", "kafka://HOST:PORT"),
        ("kafka://one:9092,/audit", "kafka://HOST:PORT"),
        ("kafka://one:9092/", "a topic of Kafka has letters"),
        ("kafka://one:9092/a/b", "not `a/b`"),
    ] {
        let error = text.parse::<KafkaAddress>().unwrap_err();
        assert!(error.contains(words), "{text}: {error}");
    }
}

// proves: P183
#[test]
fn records_of_a_file_arrive_in_one_partition_in_their_order() {
    let broker = TestBroker::start("127.0.0.1:0", 3);
    let mut sink = connect(&broker);
    sink.send(&records(1..101)).unwrap();
    sink.send(&[AuditRecord { index: 101, ..AuditRecord::new(AuditKind::Start, 5) }]).unwrap();
    let partitions = broker.indexes();
    assert!(partitions.iter().all(|all| all.is_sorted() && !all.is_empty()), "{partitions:?}");
    let mut all = partitions.concat();
    all.sort_unstable();
    assert!(all.into_iter().eq(1..=101));
    let by_key = partitions_by_key(&broker.state());
    assert_eq!(by_key.len(), 11, "files, and the log itself: {by_key:?}");
    assert!(by_key.values().all(|places| places.len() == 1), "{by_key:?}");
    assert_eq!(broker.state().batches, 4, "a batch for each partition at a time");
}

// proves: P183
#[test]
fn what_a_broker_may_not_have_is_sent_again() {
    let broker = TestBroker::start("127.0.0.1:0", 1);
    broker.state().mishaps = [Mishap::Refuses(19), Mishap::AnswerLost].into();
    let error = connect(&broker).send(&records(1..4)).unwrap_err().to_string();
    assert!(error.contains("takes nothing: too few replicas are in step"), "{error}");
    assert!(connect(&broker).send(&records(1..4)).is_err(), "the answer was lost");
    connect(&broker).send(&records(1..4)).unwrap();
    assert_eq!(broker.indexes(), [[1, 2, 3, 1, 2, 3]]);
}

#[test]
fn batches_that_are_too_large_are_halved_and_a_record_that_is_so_is_named() {
    let broker = TestBroker::start("127.0.0.1:0", 1);
    broker.state().batch_max_bytes = 1000;
    let mut sink = connect(&broker);
    sink.send(&records(1..101)).unwrap();
    assert!(broker.indexes()[0].iter().copied().eq(1..=100), "{:?}", broker.indexes());
    assert!(broker.state().batches > 10);
    broker.state().batch_max_bytes = 100;
    let error = sink.send(&records(101..103)).unwrap_err().to_string();
    assert!(error.contains("record 101 has ") && error.contains("max.message.bytes"), "{error}");
}

#[test]
fn brokers_that_are_away_and_topics_that_are_not_there_are_errors() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let connect = |address: String| {
        let sink = KafkaSink::connect(&address.parse().unwrap(), "home".into());
        sink.err().map(|error| error.to_string())
    };
    let error = connect(format!("kafka://{closed}/{TOPIC}")).unwrap();
    assert!(error.starts_with("no broker answers: 127.0.0.1:"), "{error}");
    let without = TestBroker::start("127.0.0.1:0", 0);
    let error = connect(without.address()).unwrap();
    assert!(error.contains("no topic `audit`: create it there"), "{error}");
    // One of several brokers is enough.
    let broker = TestBroker::start("127.0.0.1:0", 1);
    assert_eq!(connect(format!("kafka://{closed},{}/{TOPIC}", broker.place)), None);
    // Something else listens there: it ends the connection, or answers otherwise.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = other.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        drop(other.accept().unwrap());
        let (mut stream, _) = other.accept().unwrap();
        std::io::Write::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n").unwrap();
        std::io::Read::read(&mut stream, &mut [0; 100]).unwrap();
    });
    let error = connect(format!("kafka://{place}/{TOPIC}")).unwrap();
    assert!(error.contains("a listener of Kafka without TLS and SASL?"), "{error}");
    let error = connect(format!("kafka://{place}/{TOPIC}")).unwrap();
    assert!(error.contains("it does not speak Kafka"), "{error}");
    server.join().unwrap();
}

/// Answers from the network: an error, whatever they are, and nothing panics.
#[test]
fn hostile_answers_are_errors() {
    use super::protocol::Decoder;
    for bytes in [&[][..], &[0xff; 40], &[0x7f; 40], &[0; 3]] {
        let _ = Decoder(bytes).string();
        let _ = Decoder(bytes).each(|one| one.string());
        super::client::hostile(bytes);
    }
}
