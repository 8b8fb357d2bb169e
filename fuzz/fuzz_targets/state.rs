//! Whatever lies in a server's state directory: a server starts with it, and serves.
#![no_main]

use std::fs;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use dray_core::Op;
use dray_fuzz::{Cutter, memory, simulated};
use dray_rpc::server::{Export, FileJournal, Journal, StateLoss, Server, ServerOptions, SessionRecord};
use libfuzzer_sys::fuzz_target;

const SLOTS: u32 = 4;
/// Where in a session's file the slots begin, and how long each is.
const FIRST_SLOT: usize = 4096;
const SLOT_BYTES: usize = 1024;

/// A sound session with a change that was begun and one that was answered.
fn sound(dir: &Path) -> Vec<u8> {
    let journal = FileJournal::open(&dir.join("sound")).expect("a directory");
    let record = SessionRecord {
        id: 7,
        secret: [1; 16],
        node: 9,
        export: "data".into(),
        host: "fuzz".into(),
    };
    let log = journal.create(&record, SLOTS).expect("a session");
    log.begin(0, 1, Op::Make, &[0; 60]);
    log.begin(1, 1, Op::Rename, &[0; 90]);
    log.done(2, 1, b"answer");
    drop(log);
    let path = dir.join("sound").join(format!("session-{:016x}", record.id));
    fs::read(path).expect("the session's file")
}

fuzz_target!(|bytes: &[u8]| {
    static PLACE: OnceLock<(tempfile::TempDir, Vec<u8>)> = OnceLock::new();
    let (dir, sound) = PLACE.get_or_init(|| {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let sound = sound(dir.path());
        (dir, sound)
    });
    let mut input = Cutter(bytes);
    let sessions = dir.path().join("state").join("sessions");
    fs::create_dir_all(&sessions).expect("a directory");
    // The session as it is, but for some pieces; or nothing sound at all.
    let mut file = sound.clone();
    let how = input.byte();
    if how & 1 != 0 {
        file.truncate(usize::from(input.byte()) * 32);
    }
    for (name, bit) in [("tickets", 2), ("evicted", 4), ("stamps", 8)] {
        let path = dir.path().join("state").join(name);
        let _ = fs::remove_file(&path); // there need not be one
        if how & bit != 0 {
            let line = format!("dray {name} 1\n");
            fs::write(&path, [line.as_bytes(), input.piece()].concat()).expect("a file");
        }
    }
    while !input.0.is_empty() {
        let slot = usize::from(input.byte());
        let at = usize::from(input.byte()) * 4;
        let at = if slot == 0 { at } else { FIRST_SLOT + (slot - 1) % 4 * SLOT_BYTES + at };
        let piece = input.piece();
        let end = (at + piece.len()).min(file.len());
        if at < end {
            file[at..end].copy_from_slice(&piece[..end - at]);
        }
    }
    fs::write(sessions.join("session-0000000000000007"), &file).expect("a file");
    let journal = Arc::new(FileJournal::open(&sessions).expect("a directory"));
    simulated(async move {
        let export = Export::new("data", Arc::new(memory()), Vec::new());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        server.restore(if how & 16 == 0 { StateLoss::Nothing } else { StateLoss::Unsynced }).await;
        let _ = server.status();
        for client in server.status().clients {
            server.evict(client.session).await;
        }
    });
    let _ = fs::remove_dir_all(&sessions); // made anew
});
