//! A small model of how the size of a file is known whose data are at several servers with their own
//! disks (docs/adr/0043-own-disks.md). Every interleaving of a few clients is tried, with deaths of
//! clients and of the home at each step. Each safeguard is left out once, and then a fault must be found.
//!
//! A file has four bytes: the first two are at target 0, the others at target 1. An object keeps bytes at
//! the file's own offsets. A client's step is one call to one server, which carries it out at once. A
//! client that dies may leave a write on its way, which arrives at any later time.

use std::collections::HashSet;

const TARGETS: usize = 2;
const BYTES: usize = 4;
/// Calls that a program has to make anew because others came in between, at most.
const RETRIES: u8 = 1;

/// What the protocol may be without.
#[derive(Clone, Copy)]
struct Safeguards {
    /// While the mark stands nobody believes the size at the home.
    mark: bool,
    /// Targets refuse writes of an epoch before a cut or a settling.
    epochs: bool,
    /// Settling a size raises the epoch at the targets first.
    settling_fences: bool,
    /// The home refuses a size that was asked for before somebody opened or cut the file.
    checked_settling: bool,
    /// The home notes a cut before it begins, and the client that settles the size ends the cut.
    noted_cuts: bool,
    /// The home begins a cut once the one before it is over.
    serial_cuts: bool,
    /// The home hands out the places of appends, one after the other.
    placed_appends: bool,
    /// The place of a client that died goes to the next one with a new epoch.
    fenced_places: bool,
}

const ALL: Safeguards = Safeguards {
    mark: true,
    epochs: true,
    settling_fences: true,
    checked_settling: true,
    noted_cuts: true,
    serial_cuts: true,
    placed_appends: true,
    fenced_places: true,
};

#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Object {
    bytes: [u8; BYTES],
    size: u8,
    epoch: u8,
}

impl Object {
    fn write(&mut self, at: u8, value: u8) {
        self.bytes[usize::from(at)] = value;
        self.size = self.size.max(at + 1);
    }

    fn cut(&mut self, to: u8, holds_end: bool) {
        let size = if holds_end { to } else { self.size.min(to) };
        self.bytes[usize::from(to)..].fill(0);
        self.size = size;
    }
}

/// The stub, and what the home knows of who has it open. The openers and the count are lost with the
/// home; clients that live open the file again.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Home {
    size: u8,
    mark: bool,
    epoch: u8,
    cut: Option<u8>,
    /// The client that carries the cut out.
    cutting: Option<u8>,
    openers: u8,
    openings: u8,
    appending: Option<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Call {
    Write {
        at: u8,
    },
    Append,
    Truncate {
        to: u8,
    },
    /// What recovery does when a session has ended: it settles the size.
    Recover,
}

/// The next step of a client.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    Open,
    Place { asked: u8, end: u8 },
    Write { at: u8 },
    Refresh { at: u8 },
    BeginCut,
    Cut { target: u8 },
    EndCut,
    BeginSettling,
    Fence { target: u8, size: u8 },
    Settle { size: u8 },
    Done,
    Dead,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Client {
    call: Call,
    step: Step,
    epoch: u8,
    /// The openings that the home had counted when the settling began.
    openings: u8,
    cut: Option<u8>,
    acknowledged: bool,
    retries: u8,
    /// Clients that had died before this one began its cut.
    dead_before: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct LateWrite {
    client: u8,
    at: u8,
    epoch: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct LateCut {
    target: u8,
    to: u8,
    epoch: u8,
}

/// What a dead client has left on its way.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Late {
    Write(LateWrite),
    Cut(LateCut),
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    home: Home,
    targets: [Object; TARGETS],
    clients: Vec<Client>,
    late: Option<Late>,
    deaths_left: u8,
    home_deaths_left: u8,
    /// What may never be there again: bytes of these clients, from there on.
    cut_for_good: (u8, u8),
}

fn target_of(at: u8) -> usize {
    usize::from(at) / (BYTES / TARGETS)
}

/// The object that holds the last byte of a file of this size.
fn holds_end(target: u8, size: u8) -> bool {
    size > 0 && target_of(size - 1) == usize::from(target)
}

impl World {
    fn new(calls: &[Call], content: u8) -> World {
        let client = |call: &Call| Client {
            call: *call,
            step: match call {
                Call::Write { .. } | Call::Append => Step::Open,
                Call::Truncate { .. } => Step::BeginCut,
                Call::Recover => Step::BeginSettling,
            },
            epoch: 0,
            openings: 0,
            cut: None,
            acknowledged: false,
            retries: RETRIES,
            dead_before: 0,
        };
        let mut world = World {
            home: Home { size: content, ..Home::default() },
            targets: [Object::default(); TARGETS],
            clients: calls.iter().map(client).collect(),
            late: None,
            deaths_left: 1,
            home_deaths_left: u8::from(calls.len() < 3),
            cut_for_good: (0, 0),
        };
        (0..content).for_each(|at| world.targets[target_of(at)].write(at, b'.'));
        world
    }

    fn size(&self) -> u8 {
        self.targets.iter().map(|object| object.size).max().unwrap_or(0)
    }

    fn bytes(&self) -> [u8; BYTES] {
        std::array::from_fn(|at| self.targets[target_of(at as u8)].bytes[at])
    }

    fn dead(&self) -> u8 {
        let dead = |(index, client): (usize, &Client)| {
            if client.step == Step::Dead { 1 << index } else { 0 }
        };
        self.clients.iter().enumerate().map(dead).sum()
    }

    /// A write reaches its target. False if the target refuses its epoch.
    fn write(&mut self, rules: Safeguards, write: LateWrite) -> bool {
        let object = &mut self.targets[target_of(write.at)];
        if rules.epochs && write.epoch < object.epoch {
            return false;
        }
        object.epoch = object.epoch.max(write.epoch);
        object.write(write.at, b'A' + write.client);
        true
    }

    /// Carries out the next step of client `index`.
    fn step(&mut self, rules: Safeguards, index: usize) {
        let (me, number) = (1 << index, index as u8);
        let mut client = self.clients[index];
        client.step = match client.step {
            Step::Open => {
                self.home.mark = true;
                self.home.openers |= me;
                self.home.openings += 1;
                client.epoch = self.home.epoch;
                match client.call {
                    Call::Write { at } => Step::Write { at },
                    _ => Step::Place { asked: 0, end: 0 },
                }
            }
            Step::Place { asked, end } => {
                client.epoch = self.home.epoch;
                self.place(rules, (number, asked), end)
            }
            Step::Write { at } => {
                let write = LateWrite { client: number, at, epoch: client.epoch };
                match self.write(rules, write) {
                    true => {
                        client.acknowledged = true;
                        if self.home.appending == Some(number) {
                            self.home.appending = None; // with the close, which comes later, or before
                        }
                        Step::BeginSettling
                    }
                    false => Step::Refresh { at },
                }
            }
            Step::Refresh { at } => {
                client.epoch = self.home.epoch;
                Step::Write { at }
            }
            Step::BeginCut => {
                if rules.serial_cuts && self.home.cut.is_some() {
                    return; // waits
                }
                let Call::Truncate { to } = client.call else { unreachable!() };
                self.home.mark = true;
                self.home.cut = rules.noted_cuts.then_some(to);
                client.dead_before = self.dead();
                self.begin_cut((number, to), &mut client)
            }
            Step::Cut { target } => {
                let to = client.cut.expect("a cut has a size");
                self.cut(rules, LateCut { target, to, epoch: client.epoch });
                match usize::from(target) + 1 < TARGETS {
                    true => Step::Cut { target: target + 1 },
                    false => Step::EndCut,
                }
            }
            Step::EndCut => {
                if self.home.cutting == Some(number) {
                    (self.home.cut, self.home.cutting) = (None, None);
                }
                if let Call::Truncate { to } = client.call {
                    client.acknowledged = true;
                    self.cut_for_good = match self.cut_for_good.0 {
                        0 => (client.dead_before, to),
                        _ => self.cut_for_good, // the first is enough, and any other may be larger
                    };
                }
                Step::BeginSettling
            }
            Step::BeginSettling => self.begin_settling(rules, number, &mut client),
            Step::Fence { target, size } => {
                let object = &mut self.targets[usize::from(target)];
                if rules.settling_fences {
                    object.epoch = object.epoch.max(client.epoch);
                }
                let size = size.max(object.size);
                match usize::from(target) + 1 < TARGETS {
                    true => Step::Fence { target: target + 1, size },
                    false => Step::Settle { size },
                }
            }
            Step::Settle { size } => self.settle(rules, (me, size), &mut client),
            Step::Done | Step::Dead => unreachable!("it has no step"),
        };
        self.clients[index] = client;
    }

    /// A cut of an epoch of its own, by this client alone.
    fn begin_cut(&mut self, (number, to): (u8, u8), client: &mut Client) -> Step {
        self.home.epoch += 1;
        self.home.cutting = Some(number);
        (client.epoch, client.cut) = (self.home.epoch, Some(to));
        Step::Cut { target: 0 }
    }

    fn cut(&mut self, rules: Safeguards, LateCut { target, to, epoch }: LateCut) {
        let object = &mut self.targets[usize::from(target)];
        if rules.epochs && epoch < object.epoch {
            return;
        }
        object.epoch = object.epoch.max(epoch);
        object.cut(to, holds_end(target, to));
    }

    /// Finds the end for an append: with the home's leave one after the other, or else by asking targets.
    fn place(&mut self, rules: Safeguards, (number, asked): (u8, u8), end: u8) -> Step {
        if rules.placed_appends {
            if self.home.appending.is_some_and(|other| other != number) {
                return Step::Place { asked, end }; // waits
            }
            self.home.appending = Some(number);
        }
        let end = end.max(self.targets[usize::from(asked)].size);
        match usize::from(asked) + 1 < TARGETS {
            true => Step::Place { asked: asked + 1, end },
            false => Step::Write { at: end },
        }
    }

    fn begin_settling(&mut self, rules: Safeguards, number: u8, client: &mut Client) -> Step {
        let me = 1 << number;
        if !self.home.mark {
            return Step::Done;
        }
        if self.home.openers & !me != 0 {
            self.home.openers &= !me; // another one settles it
            return Step::Done;
        }
        if let Some(to) = self.home.cut {
            return match self.home.cutting {
                Some(_) => Step::BeginSettling, // waits
                None => self.begin_cut((number, to), client),
            };
        }
        if rules.settling_fences {
            self.home.epoch += 1;
        }
        client.epoch = self.home.epoch;
        client.openings = self.home.openings;
        Step::Fence { target: 0, size: 0 }
    }

    fn settle(&mut self, rules: Safeguards, (me, size): (u8, u8), client: &mut Client) -> Step {
        let same = (client.epoch, client.openings) == (self.home.epoch, self.home.openings);
        if rules.checked_settling && (!same || self.home.openers & !me != 0) {
            if client.retries == 0 {
                self.home.openers &= !me;
                return Step::Done; // the mark stands
            }
            client.retries -= 1;
            return Step::BeginSettling;
        }
        self.home.openers &= !me;
        self.home.size = size;
        self.home.mark = false;
        Step::Done
    }

    /// Every world that can come next.
    fn next(&self, rules: Safeguards) -> Vec<World> {
        let mut worlds = Vec::new();
        for (index, client) in self.clients.iter().enumerate() {
            if matches!(client.step, Step::Done | Step::Dead) {
                continue;
            }
            let mut world = self.clone();
            world.step(rules, index);
            if world != *self {
                worlds.push(world);
            }
            if self.deaths_left > 0 && client.call != Call::Recover {
                worlds.extend(self.with_death(rules, index));
            }
        }
        if let Some(late) = self.late {
            let mut world = World { late: None, ..self.clone() };
            match late {
                Late::Write(write) => _ = world.write(rules, write),
                Late::Cut(cut) => world.cut(rules, cut),
            }
            worlds.push(world);
        }
        if self.home_deaths_left > 0 {
            worlds.push(self.with_home_death());
        }
        worlds
    }

    /// The client dies: before it sends its next call, or with a write on its way.
    fn with_death(&self, rules: Safeguards, index: usize) -> Vec<World> {
        let mut dead = self.clone();
        let client = &mut dead.clients[index];
        let Client { step, epoch, cut, .. } =
            std::mem::replace(client, Client { step: Step::Dead, acknowledged: false, ..*client });
        dead.deaths_left -= 1;
        dead.home.openers &= !(1 << index); // the end of its session
        if dead.home.appending == Some(index as u8) {
            dead.home.appending = None;
            dead.home.epoch += u8::from(rules.fenced_places);
        }
        if dead.home.cutting == Some(index as u8) {
            dead.home.cutting = None; // the cut itself is noted
        }
        let late = match (step, cut) {
            (Step::Write { at }, _) => {
                Some(Late::Write(LateWrite { client: index as u8, at, epoch }))
            }
            (Step::Cut { target }, Some(to)) => Some(Late::Cut(LateCut { target, to, epoch })),
            _ => None,
        };
        let mut worlds = vec![dead.clone()];
        if late.is_some() {
            worlds.push(World { late, ..dead });
        }
        worlds
    }

    /// The home dies and comes back: what is on its disk stays, and clients open their files again.
    fn with_home_death(&self) -> World {
        let mut world = self.clone();
        world.home_deaths_left -= 1;
        world.home.openings += 1; // no number of the epoch before comes again
        world
    }

    /// What is wrong in this world, in whatever state it is.
    fn fault(&self, rules: Safeguards) -> Option<&'static str> {
        let believes_home = !self.home.mark || !rules.mark;
        if believes_home && self.home.size != self.size() {
            return Some("the home's size is wrong");
        }
        let (dead, to) = self.cut_for_good;
        let of_dead = |byte: &u8| {
            byte.checked_sub(b'A').is_some_and(|client| client < 8 && dead & 1 << client != 0)
        };
        if self.bytes()[usize::from(to)..].iter().any(of_dead) {
            return Some("a late write has brought cut data back");
        }
        None
    }

    /// What is wrong where nothing more happens.
    fn fault_at_end(&self) -> Option<&'static str> {
        let ended = |client: &Client| matches!(client.step, Step::Done | Step::Dead);
        if self.late.is_some() || !self.clients.iter().all(ended) {
            return None;
        }
        let bytes = self.bytes();
        let cuts = self.clients.iter().any(|client| matches!(client.call, Call::Truncate { .. }));
        for (index, client) in self.clients.iter().enumerate() {
            let present = bytes.contains(&(b'A' + index as u8));
            let writes = matches!(client.call, Call::Write { .. } | Call::Append);
            if writes && client.acknowledged && !cuts && !present {
                return Some("an acknowledged write is lost");
            }
        }
        let [Client { call: Call::Truncate { to }, .. }, Client { call: Call::Recover, .. }] =
            self.clients[..]
        else {
            return None;
        };
        let kept = bytes.iter().filter(|byte| **byte == b'.').count();
        let whole = kept == usize::from(to) || kept == BYTES;
        (!whole && !self.home.mark).then_some("half a cut stays")
    }
}

/// Tries everything. The first fault, and how many worlds were seen.
fn explore(rules: Safeguards, first: World) -> (Option<&'static str>, usize) {
    let mut seen = HashSet::from([first.clone()]);
    let mut open = vec![first];
    while let Some(world) = open.pop() {
        if let Some(fault) = world.fault(rules).or_else(|| world.fault_at_end()) {
            return (Some(fault), seen.len());
        }
        for next in world.next(rules) {
            if seen.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    (None, seen.len())
}

/// Calls that are under way together, and how long the file is before.
fn scenarios() -> Vec<(Vec<Call>, u8)> {
    use Call::*;
    vec![
        (vec![Write { at: 0 }, Write { at: 3 }, Recover], 0),
        (vec![Write { at: 3 }, Truncate { to: 1 }, Recover], 0),
        (vec![Write { at: 3 }, Recover], 0),
        (vec![Write { at: 2 }, Truncate { to: 1 }, Truncate { to: 3 }], 2),
        (vec![Truncate { to: 1 }, Recover], 4),
        (vec![Truncate { to: 1 }, Truncate { to: 3 }, Recover], 4),
        (vec![Append, Append, Recover], 1),
        (vec![Append, Write { at: 2 }, Recover], 1),
    ]
}

fn first_fault(rules: Safeguards) -> Option<&'static str> {
    scenarios()
        .into_iter()
        .find_map(|(calls, content)| explore(rules, World::new(&calls, content)).0)
}

#[test]
fn no_interleaving_and_no_death_makes_a_size_wrong() {
    let mut worlds = 0;
    for (number, (calls, content)) in scenarios().into_iter().enumerate() {
        let (fault, seen) = explore(ALL, World::new(&calls, content));
        assert_eq!(fault, None, "scenario {number}");
        worlds += seen;
    }
    assert!(worlds > 100_000, "{worlds} worlds are too few to be all of them");
}

#[test]
fn each_safeguard_is_needed() {
    let late = "a late write has brought cut data back";
    let (size, lost) = ("the home's size is wrong", "an acknowledged write is lost");
    for (rules, fault) in [
        (Safeguards { mark: false, ..ALL }, size),
        (Safeguards { epochs: false, ..ALL }, size),
        (Safeguards { settling_fences: false, ..ALL }, size),
        (Safeguards { checked_settling: false, ..ALL }, size),
        (Safeguards { noted_cuts: false, ..ALL }, "half a cut stays"),
        (Safeguards { serial_cuts: false, ..ALL }, late),
        (Safeguards { placed_appends: false, ..ALL }, lost),
        (Safeguards { fenced_places: false, ..ALL }, lost),
    ] {
        let found: HashSet<_> = scenarios()
            .into_iter()
            .filter_map(|(calls, content)| explore(rules, World::new(&calls, content)).0)
            .collect();
        assert!(found.contains(fault), "{fault}: {found:?}");
    }
    assert_eq!(first_fault(ALL), None);
}
