//! Whatever a server gives as the definition of a projection is an error, or can be used. Then its
//! canonical text says the same.
#![no_main]

use dray_core::FileId;
use dray_layers::placement::{Placement, parse_definitions};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(definitions) = parse_definitions(&String::from_utf8_lossy(bytes)) else { return };
    for definition in definitions {
        let canonical = definition.canonical();
        let again = parse_definitions(&canonical).expect("a canonical text is a definition");
        assert_eq!(again.len(), 1);
        assert_eq!(again[0].canonical(), canonical);
        assert_eq!(again[0].fingerprint(), definition.fingerprint());
        let placement = Placement::new(&definition);
        for ino in [0, 1, u64::MAX] {
            let id = FileId { ino, generation: 0 };
            let last = placement.pieces(id, ino, 3 << 20).last();
            let servers = [Some(placement.home(id)), last.map(|(server, _)| server)];
            for server in servers.into_iter().flatten() {
                assert!(usize::from(server.0) < definition.servers.len());
            }
        }
    }
});
