//! The client learns from a file system how long its answers may be believed.

use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, server_of, simulate};
use dray_core::{
    Buf, Context, CreateHow, Errno, FileSystem, Name, OpenHow, PageValidity, SetAttr, Ttl, Validity,
};
use dray_fabric::sim::Network;
use dray_rpc::server::ServerOptions;
use dray_rt::Scope;

const SAID: Validity = Validity {
    name: Some(Ttl::ZERO),
    attributes: Some(Ttl::FOREVER),
    pages: Some(PageValidity::UntilRevoked),
};

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

/// The validity that each answer about the file `name` gives. That of an open, asked and unasked,
/// is none if no attributes came with it.
async fn said(fs: &dyn FileSystem, text: &str) -> ([Validity; 5], [Option<Validity>; 2]) {
    let (cx, root) = (Context::system(), fs.info().root);
    let entry = fs.lookup(&cx, root, name(text)).await.unwrap();
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let [mut asked, mut unasked] = [None; 2];
    let mut opened = Validity::UNSAID;
    for (at_open, with_attr) in [(&mut asked, true), (&mut unasked, false)] {
        let how = OpenHow { with_attr, ..OpenHow::READ };
        let file = fs.open(&cx, entry.id, how).await.unwrap();
        *at_open = file.at_open().map(|seen| seen.attr.validity);
        opened = file.getattr(&cx).await.unwrap().validity;
        file.close(&cx).await.unwrap();
    }
    let directory = fs.open(&cx, root, OpenHow::DIRECTORY).await.unwrap();
    let page = directory.readdir(&cx, 0, 1 << 16, true).await.unwrap();
    let listed = page.iter().find(|(one, _)| *one == text.as_bytes()).unwrap().1.attr.unwrap();
    directory.close(&cx).await.unwrap();
    let got = fs.getattr(&cx, entry.id).await.unwrap();
    let changed = fs.setattr(&cx, entry.id, set).await.unwrap();
    let all = [entry.attr, got, changed, listed].map(|attr| attr.validity);
    ([all[0], all[1], all[2], all[3], opened], [asked, unasked])
}

#[test]
fn each_answer_carries_what_is_said_of_its_file() {
    simulate(1, async {
        let (network, scope, below) = (Network::new(), Scope::new(), memory());
        let server = server_of(below.clone(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), fs.info().root);
        for text in ["silent", "says"] {
            let content = Buf::from(&b"content"[..]);
            below.put(&cx, root, name(text), 0o600, content).await.unwrap();
        }
        let says = below.lookup(&cx, root, name("says")).await.unwrap().id;
        below.set_validity(says, SAID).unwrap();
        assert_eq!(said(&fs, "says").await, ([SAID; 5], [Some(SAID); 2]));
        let none = Validity::UNSAID;
        assert_eq!(said(&fs, "silent").await, ([none; 5], [Some(none), None]));
        // The file that a change makes, and opens.
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: false };
        let (entry, file) = fs.create(&cx, root, name("says"), how).await.unwrap();
        assert_eq!(entry.attr.validity, SAID);
        file.close(&cx).await.unwrap();
        fs.session().goodbye();
    });
}

#[test]
fn a_lookup_that_fails_says_how_long_there_is_no_such_name() {
    simulate(2, async {
        let (network, scope, below) = (Network::new(), Scope::new(), memory());
        let server = server_of(below.clone(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), fs.info().root);
        for ttl in [None, Some(Ttl::ZERO), Some(Ttl::of(Duration::from_millis(1500)))] {
            below.set_absence(ttl).unwrap();
            let error = fs.lookup(&cx, root, name("none")).await.unwrap_err();
            assert_eq!((error.errno(), error.absence()), (Errno::ENOENT, ttl));
        }
        fs.session().goodbye();
    });
}
