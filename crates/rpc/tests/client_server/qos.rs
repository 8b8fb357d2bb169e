//! Shares of bandwidth at a server: who waits, and what others have meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, simulate};
use dray_core::{
    Buf, BufMut, Class, Context, CreateHow, FileSystem, Identity, Name, NodeId, OpenFile, OpenHow,
    Pid, RequestId, SetAttr, Uid, Write,
};
use dray_fabric::sim::Network;
use dray_layers::qos::rules::Amount;
use dray_layers::qos::{Pattern, QosGate, QosRule, RuleKey, RuleSet};
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::{Join, Scope, now, sleep, spawn_join};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: true };
const MIB: usize = 1 << 20;

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

fn user(uid: u32) -> Context {
    let who = Arc::new(Identity { uid: Uid(uid), ..Identity::default() });
    Context::new(NodeId(7), RequestId(0), who, Pid(uid))
}

/// A rule about one user.
fn of_user(uid: u32) -> QosRule {
    QosRule {
        name: format!("user-{uid}"),
        matches: BTreeMap::from([(RuleKey::User, vec![Pattern::Ids(uid, uid)])]),
        ..QosRule::default()
    }
}

fn limited(uid: u32, limit: usize) -> QosRule {
    QosRule { limit: Some(Amount::Units(limit as u64)), ..of_user(uid) }
}

fn set(gate: &QosGate, rules: &[QosRule]) {
    gate.set_rules(RuleSet::new(rules).unwrap());
}

/// A mount of a server with these shares.
async fn mount(gate: &QosGate, server_process: &Scope) -> RemoteFs {
    let network = Network::new();
    let mut export = Export::new("data", Arc::new(memory()), Vec::new());
    export.admission = Some(gate.admission(None));
    let server =
        Server::new(ServerOptions::default(), vec![export], Arc::new(MemoryJournal::default()));
    serve_simulated(&network, "s", &server, server_process);
    let fs = connect(network.connector("s"), client_options()).await.unwrap();
    let everybody = SetAttr { mode: Some(0o777), ..SetAttr::default() };
    fs.setattr(&Context::system(), fs.info().root, everybody).await.unwrap();
    fs
}

async fn create(fs: &RemoteFs, cx: &Context, file: &str) -> Arc<dyn OpenFile> {
    fs.create(cx, fs.info().root, name(file), NEW).await.unwrap().1
}

/// Starts `count` writes of 1 MiB each.
fn write_much(file: &Arc<dyn OpenFile>, cx: &Context, count: usize) -> Vec<Join<()>> {
    let write = |index: usize| {
        let (file, cx) = (file.clone(), cx.clone());
        spawn_join(async move {
            let how = Write::at((index * MIB) as u64);
            file.write(&cx, how, Buf::from(vec![1; MIB])).await.unwrap();
        })
    };
    (0..count).map(write).collect()
}

// proves: P195
#[test]
fn the_calls_of_others_on_the_same_mount_do_not_wait_for_those_of_one_who_is_held_up() {
    simulate(1, async {
        let (server_process, gate) = (Scope::new(), QosGate::new());
        set(&gate, &[limited(1000, MIB)]);
        let fs = mount(&gate, &server_process).await;
        let (greedy, other) = (user(1000), user(1001));
        let file = create(&fs, &greedy, "greedy").await;
        // More than there are replay slots, and than a connection takes calls.
        let writes = write_much(&file, &greedy, 200);
        let reader = file.clone();
        let reads: Vec<_> = (0..200)
            .map(|_| {
                let (file, cx) = (reader.clone(), greedy.clone());
                spawn_join(async move {
                    file.read(&cx, 0, BufMut::heap(MIB))
                        .await
                        .map(drop)
                        .map_err(|(e, _)| e)
                        .unwrap();
                })
            })
            .collect();
        sleep(Duration::from_millis(100)).await;
        let begun = now();
        let own = create(&fs, &other, "other").await;
        for _ in 0..10 {
            own.write(&other, Write::at(0), Buf::from(vec![2; 4096])).await.unwrap();
            own.read(&other, 0, BufMut::heap(4096)).await.map_err(|(e, _)| e).unwrap();
            fs.getattr(&other, fs.info().root).await.unwrap();
        }
        assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
        let report = gate.report();
        let held_up = report.classes.iter().find(|class| class.rule == "user-1000").unwrap();
        assert!(held_up.counts.waiting > 20, "{held_up:?}");
        // All go on at once without the rule.
        let begun = now();
        set(&gate, &[]);
        for call in writes.into_iter().chain(reads) {
            call.await.unwrap();
        }
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        assert_eq!(gate.report().in_service_bytes, 0, "each gave back what it held");
    });
}

// proves: P196
#[test]
fn a_limit_holds_and_a_rule_that_changes_counts_at_once() {
    simulate(2, async {
        let (server_process, gate) = (Scope::new(), QosGate::new());
        set(&gate, &[limited(1000, 10 * MIB)]);
        let fs = mount(&gate, &server_process).await;
        let cx = user(1000);
        let file = create(&fs, &cx, "file").await;
        let begun = now();
        for write in write_much(&file, &cx, 30) {
            write.await.unwrap();
        }
        let lasted = begun.elapsed().as_secs_f64();
        assert!((2.7..3.2).contains(&lasted), "30 MiB of 10 a second: {lasted}");
        let writes = write_much(&file, &cx, 50);
        sleep(Duration::from_millis(500)).await;
        let begun = now();
        set(&gate, &[limited(1000, 1000 * MIB)]);
        for write in writes {
            write.await.unwrap();
        }
        assert!(begun.elapsed() < Duration::from_millis(200), "{:?}", begun.elapsed());
    });
}

#[test]
fn users_share_the_limit_of_an_export_by_their_weights() {
    simulate(3, async {
        let (server_process, gate) = (Scope::new(), QosGate::new());
        let whole = QosRule {
            name: "export".to_owned(),
            limit: Some(Amount::Units(40 << 20)),
            ..QosRule::default()
        };
        let heavy = QosRule { weight_milli: Some(3000), ..of_user(1000) };
        set(&gate, &[whole, heavy, of_user(1001)]);
        let fs = mount(&gate, &server_process).await;
        let (one, other) = (user(1000), user(1001));
        let files = [create(&fs, &one, "one").await, create(&fs, &other, "other").await];
        let _writes = [write_much(&files[0], &one, 200), write_much(&files[1], &other, 200)];
        sleep(Duration::from_millis(500)).await;
        let bytes = || {
            let classes = gate.report().classes;
            let of = |rule: &str| {
                let class = classes.iter().find(|class| class.rule == rule);
                class.map_or(0, |class| class.counts.bytes)
            };
            [of("user-1000"), of("user-1001")]
        };
        let before = bytes();
        sleep(Duration::from_secs(1)).await;
        let after = bytes();
        let done = [after[0] - before[0], after[1] - before[1]];
        let share = done[0] as f64 / (done[0] + done[1]) as f64;
        assert!((0.71..0.79).contains(&share), "{done:?}");
        let report = gate.report();
        let heavy = report.classes.iter().find(|class| class.rule == "user-1000").unwrap();
        assert!((heavy.entitled - 0.75).abs() < 0.01, "{heavy:?}");
        assert!((heavy.share - heavy.entitled).abs() < 0.05, "{heavy:?}");
        set(&gate, &[]);
    });
}

// proves: P213
#[test]
fn background_calls_of_a_user_yield_to_the_others() {
    simulate(4, async {
        let (server_process, gate) = (Scope::new(), QosGate::new());
        let whole = QosRule {
            name: "export".to_owned(),
            limit: Some(Amount::Units(20 << 20)),
            ..QosRule::default()
        };
        set(&gate, &[whole, of_user(1000)]);
        let fs = mount(&gate, &server_process).await;
        let cx = user(1000);
        let prefetch = Context { class: Class::Background, ..cx.clone() };
        let files = [create(&fs, &cx, "one").await, create(&fs, &cx, "other").await];
        let _background = write_much(&files[0], &prefetch, 20);
        sleep(Duration::from_millis(50)).await;
        let begun = now();
        for write in write_much(&files[1], &cx, 20) {
            write.await.unwrap();
        }
        // As if it were alone, but for what the others had begun and their hundredth.
        assert!(begun.elapsed() < Duration::from_millis(1300), "{:?}", begun.elapsed());
        let classes = gate.report().classes;
        let class = classes.iter().find(|class| class.value.contains("background")).unwrap();
        assert!(class.counts.waiting > 10, "{class:?}");
        set(&gate, &[]);
    });
}
