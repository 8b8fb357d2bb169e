use dray_layers::audit::{Audit, AuditOptions, FullPolicy, KindSet};

use super::kafka::test_broker::{Mishap, TestBroker};
use super::*;
use crate::serve::audit::log_dir;

/// How long anything is waited for.
const WAIT_MAX: Duration = Duration::from_secs(20);

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = dray_rt::now();
    while !is_so() {
        assert!(begun.elapsed() < WAIT_MAX, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Opens the log, which leaves a record of that.
fn open(state: &Path) -> Arc<Audit> {
    let dir = log_dir(state, "home");
    std::fs::create_dir_all(&dir).unwrap();
    let options = AuditOptions {
        export: "home".to_owned(),
        dir,
        kinds: KindSet::all(),
        full: FullPolicy::Block,
        spill: None,
        max_bytes: 1 << 20,
        segment_bytes: 64 << 10,
    };
    Audit::open(options, Box::new(|_| None)).unwrap()
}

/// The bookmark moved with what the other end had not taken, or nobody saw why it did not move.
// proves: P183
#[test]
fn a_bookmark_moves_when_the_brokers_have_the_records_and_until_then_stat_says_why_not() {
    let state = tempfile::tempdir().unwrap();
    drop(open(state.path()));
    let broker = TestBroker::start("127.0.0.1:0", 1);
    broker.state().mishaps = [Mishap::Refuses(19); 100].into();
    let text = format!("type = 'kafka'\naddress = '{}'", broker.address());
    let plan = toml::from_str::<SinkTable>(&text).unwrap().plan("bus").unwrap();
    let place = LogPlace::in_state(state.path(), "home");
    let task = SinkTask { plan, place: place.clone(), trouble: None };
    let (consumers, name) = (place.consumers(), task.consumer_name());
    std::thread::spawn(move || task.run()); // to the end of the process
    let consumer = || consumers.find(&name).unwrap().unwrap_or_default();
    wait_for("no trouble", || consumer().trouble.contains("too few replicas are in step"));
    assert!(consumer().bookmark == 1 && consumer().trouble_us > 0, "{:?}", consumer());
    broker.state().mishaps.clear();
    wait_for("trouble, or no move", || consumer().trouble.is_empty() && consumer().bookmark == 2);
    assert_eq!(broker.indexes(), [[1]]);
}

#[test]
fn consumers_of_sinks_that_are_gone_are_named() {
    let text = "type = 'file'\npath = '/x'\nexports = ['home']";
    let plan = toml::from_str::<SinkTable>(text).unwrap().plan("siem").unwrap();
    let known = ["mine", "sink-old", "sink-siem"]
        .map(|name| Consumer { name: name.to_owned(), ..Consumer::default() });
    let plans = std::slice::from_ref(&plan);
    assert_eq!(former_sinks(plans, "home", &known), ["sink-old"]);
    assert_eq!(former_sinks(plans, "other", &known), ["sink-old", "sink-siem"]);
}
