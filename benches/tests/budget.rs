//! Upper bounds on what single calls cost, where the machine's mood has no say. They are there so
//! that a change that makes every call dearer is noticed by its author. A bound is raised only
//! together with a word on why.

use dray_bench::alloc::CountingAllocator;
use dray_bench::counters::{self, OperationCost};
use dray_bench::layers;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Operation, then the most allocations at the client and at the server, whose file system is in
/// memory. Then bytes copied beside the backend's own, round trips, system calls of each end.
struct Budget {
    op: &'static str,
    client_allocations: f64,
    server_allocations: f64,
    copied_bytes: f64,
    round_trips: f64,
    system_calls: f64,
}

const fn budget(
    op: &'static str,
    client_allocations: f64,
    server_allocations: f64,
    copied_bytes: f64,
    round_trips: f64,
    system_calls: f64,
) -> Budget {
    Budget { op, client_allocations, server_allocations, copied_bytes, round_trips, system_calls }
}

/// As measured, and a little above: a buffer that grows once in a thousand calls is no
/// news. System calls are those of the epoll driver, at depth 1, over a Unix socket, whose
/// small buffer splits the megabytes.
const BUDGETS: [Budget; 17] = [
    budget("lookup", 1.1, 1.1, 0.0, 1.0, 9.0),
    // A projection of one server passes calls on.
    budget("lookup_placed", 1.1, 1.1, 0.0, 1.0, 9.0),
    budget("getattr", 1.1, 1.1, 0.0, 1.0, 9.0),
    // A lookup and a getattr that are leased. A look at the server every five seconds may fall into it.
    budget("stat_leased", 2.1, 0.1, 0.0, 0.0, 0.1),
    budget("read_4k", 1.1, 2.1, 8192.0, 1.0, 9.0),
    budget("read_1m", 2.1, 2.1, 1_052_672.0, 1.0, 60.0),
    budget("write_4k", 1.1, 3.1, 4096.0, 1.0, 9.0),
    budget("write_1m", 2.1, 4.1, 8192.0, 1.0, 60.0),
    // A close is a message without an answer. It waits for company, a few milliseconds at most. On
    // a busy machine that is over now and then, and takes a timer and a message of its own.
    budget("open_close", 3.5, 3.5, 0.0, 1.0, 18.0),
    // And an open file.
    budget("open_close_placed", 5.5, 9.5, 0.0, 1.0, 18.0),
    // Creation, close, lookup and removal.
    budget("create_unlink", 6.5, 31.2, 0.0, 3.0, 36.0),
    // And a future and an open file, of the creation.
    budget("create_unlink_placed", 8.5, 31.2, 0.0, 3.0, 36.0),
    // Of a file whose home has its name, too. A future more, of the lookup. The creation is in steps, since the home is
    // known behind it. It keeps its replay slot in the room of the creation before.
    budget("create_unlink_of_two", 8.5, 31.2, 0.0, 3.0, 36.0),
    // One more each for the intent that lets a restarted server tell what was applied.
    // At the client for the note of the name, by which a loss of power can be reported.
    budget("create_close", 4.5, 11.6, 0.0, 1.0, 18.0),
    // Creation and write. The answers bring the attributes of directory and file, which are looked up at the server
    // and leased.
    budget("small_file_leased", 11.5, 31.0, 4096.0, 2.0, 36.0),
    budget("put_4k", 3.5, 12.6, 4096.0, 1.0, 9.0),
    budget("remove", 2.1, 5.1, 0.0, 1.0, 9.0),
];

/// Calls that nobody made, for one that somebody did. What was changed half a minute ago is synced.
/// On a busy machine that is in the middle of the counting.
const SYNCS_MAX: f64 = 0.01;

fn check(cost: &OperationCost, budget: &Budget) -> Vec<String> {
    let mut figures = vec![
        ("allocations at the client", cost.client_allocations, budget.client_allocations),
        ("allocations at the server", cost.server_allocations, budget.server_allocations),
        ("bytes copied", cost.copied_bytes, budget.copied_bytes),
        ("round trips", cost.round_trips, budget.round_trips + SYNCS_MAX),
    ];
    // Where the kernel does not let us count them, nothing is said about them.
    if let Some((client, server)) = cost.system_calls {
        figures.push(("system calls at the client", client, budget.system_calls));
        figures.push(("system calls at the server", server, budget.system_calls));
    }
    let over = figures.into_iter().filter(|(_, value, most)| value > most);
    over.map(|(what, value, most)| format!("{}: {value} {what}, at most {most}", cost.op)).collect()
}

#[test]
fn calls_stay_within_their_budget() {
    let dir = tempfile::tempdir().unwrap();
    let costs = counters::all(dir.path()).unwrap();
    assert_eq!(costs.len(), BUDGETS.len(), "an operation without a budget");
    let mut over = Vec::new();
    for cost in &costs {
        let budget = BUDGETS.iter().find(|budget| budget.op == cost.op);
        over.extend(check(cost, budget.unwrap_or_else(|| panic!("no budget for {}", cost.op))));
    }
    assert!(over.is_empty(), "{}", over.join("\n"));
}

#[test]
fn a_call_over_its_budget_is_noticed() {
    let cost = OperationCost {
        op: "read_4k",
        client_allocations: 2.0,
        server_allocations: 2.0,
        client_allocated_bytes: 0.0,
        server_allocated_bytes: 0.0,
        copied_bytes: 8192.0,
        round_trips: 1.0,
        system_calls: Some((4.0, 10.0)),
    };
    assert_eq!(check(&cost, &BUDGETS[4]).len(), 2);
}

#[test]
fn five_boxed_layers_allocate_once_each() {
    let cost = layers::five(100_000);
    assert!(cost.allocations <= 5.01, "{cost:?}");
}
