//! Dumps into clusters: the JSON form, exit codes, several files of one host, and files that must be refused.

use std::fmt::Write as _;

use infercluster_tests::scratch::Scratch;
use serde_json::{Value, json};

use crate::program;

/// `nvidia-smi topo -m` of two devices joined by NVLink and a NIC at one of them.
const TOPOLOGY: &str = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n\
    GPU0\t X \tNV12\tPIX\t0-31\t0\t\tN/A\n\
    GPU1\tNV12\t X \tSYS\t32-63\t1\t\tN/A\n\
    NIC0\tPIX\tSYS\t X \n\n\
    NIC Legend:\n\n  NIC0: mlx5_0\n";
const LIST: &str =
    "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aa)\nGPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bb)\n";
const ADAPTER: &str = "CA 'mlx5_0'\n\tCA type: MT4123\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: Active\n\
    \t\tPhysical state: LinkUp\n\t\tRate: 200\n\t\tBase lid: 7\n\t\tSM lid: 1\n\t\tPort GUID: 0x1\n\
    \t\tLink layer: InfiniBand\n";

#[test]
fn one_dump_answers_with_the_keys_of_the_contract() {
    let scratch = Scratch::new(program());
    scratch.write("paste", TOPOLOGY);
    let answer = scratch.run(&["cluster", "import", "paste", "--json"]);
    assert_eq!(answer.code, Some(1), "types are still needed: {answer}");
    let found = answer.json();
    assert_eq!(found["kind"], "topo-m");
    assert_eq!((&found["gpus"], &found["nics"]), (&json!(2), &json!(1)));
    assert_eq!(found["counts"], json!({"NV12": 1}));
    assert_eq!(
        (&found["complete"], &found["problems"]),
        (&json!(true), &json!([]))
    );
    let needs = found["needs"].to_string();
    for flag in ["--gpu-type", "--link-bandwidth", "--nic-speed"] {
        assert!(needs.contains(flag), "{flag} is not asked for: {answer}");
    }
    let cut = TOPOLOGY.split("NIC0\tPIX").next().unwrap();
    scratch.write("cut", cut);
    let answer = scratch.run(&["cluster", "import", "cut", "--json"]);
    assert_eq!(answer.code, Some(1), "{answer}");
    assert_eq!(answer.json()["complete"], json!(false));
    assert_eq!(answer.json()["problems"][0]["line"], json!(1), "{answer}");
    scratch.write("list", "GPU 0: NVIDIA L40S (UUID: GPU-0)\n");
    let whole = scratch
        .run(&["cluster", "import", "list", "--json"])
        .done()
        .json();
    assert_eq!(
        (&whole["counts"], &whole["nics"]),
        (&json!({"mig_devices": 0}), &Value::Null)
    );
}

#[test]
fn dumps_of_one_host_become_one_cluster() {
    let scratch = Scratch::new(program());
    scratch.write("topo", TOPOLOGY);
    scratch.write("list", LIST);
    scratch.write("ibstat", ADAPTER);
    for output in ["cluster.toml", "cluster.json"] {
        let answer = scratch
            .run(&[
                "cluster", "import", "topo", "list", "ibstat", "-o", output, "--json",
            ])
            .done();
        assert_eq!(answer.json().as_array().unwrap().len(), 3);
        let cluster = scratch.run(&["cluster", "show", output, "--json"]).done().json();
        let gpus = cluster["nodes"][0]["gpus"].as_array().unwrap().len();
        assert_eq!(
            (gpus, &cluster["nodes"][0]["nics"][0]["name"]),
            (2, &json!("mlx5_0"))
        );
        let links = cluster["links"].as_array().unwrap();
        let direct = links
            .iter()
            .find(|link| link["from"] == "gpu:0" && link["to"] == "gpu:1")
            .unwrap();
        // Twelve links of 25 GB/s.
        assert_eq!(
            (&direct["kind"], &direct["bandwidth"]),
            (&json!("nvlink"), &json!("300 GB/s"))
        );
        let below_switch = |end: &str| {
            links
                .iter()
                .any(|link| link["from"] == end && link["to"] == "bridge:0/1")
        };
        assert!(below_switch("gpu:0") && below_switch("nic:0/0") && !below_switch("gpu:1"));
        let picture = scratch.run(&["cluster", "show", output]).done();
        assert!(picture.stdout.contains("PCIe switch 1"), "{picture}");
        assert!(
            picture.stdout.contains("every two by nvlink 300 GB/s"),
            "{picture}"
        );
        assert!(
            picture.stdout.lines().all(|line| line.chars().count() <= 100),
            "{picture}"
        );
    }
}

#[test]
fn flags_give_what_dumps_leave_open() {
    let scratch = Scratch::new(program());
    scratch.write("topo", TOPOLOGY);
    let flags = [
        "--gpu-type",
        "a100-pcie-80gb",
        "--link-bandwidth",
        "20 GB/s",
        "--nic-speed",
        "hdr",
        "--nodes",
        "3",
    ];
    let sockets = ["--socket-bandwidth", "40 GB/s", "-o", "cluster.json"];
    let call: Vec<&str> = ["cluster", "import", "topo"]
        .into_iter()
        .chain(flags)
        .chain(sockets)
        .collect();
    scratch.run(&call).done();
    let cluster = scratch
        .run(&["cluster", "show", "cluster.json", "--json"])
        .done()
        .json();
    assert_eq!(cluster["nodes"].as_array().unwrap().len(), 3);
    let links = cluster["links"].as_array().unwrap();
    assert!(
        links
            .iter()
            .any(|link| link["kind"] == "socket" && link["bandwidth"] == "40 GB/s")
    );
    assert!(
        links
            .iter()
            .any(|link| link["kind"] == "nvlink" && link["bandwidth"] == "240 GB/s")
    );
    scratch.write("sinfo", "NODELIST GRES\nn[01-04] gpu:v100:4\n");
    let answer = scratch.run(&["cluster", "import", "sinfo", "-o", "none.toml"]);
    assert_eq!(answer.code, Some(1), "{answer}");
    assert!(
        answer.stdout.contains("v100=NAME") && answer.stderr.contains("not written"),
        "{answer}"
    );
    let given = [
        "--gpu-type",
        "v100=v100-sxm2-32gb",
        "--fabric",
        "nvswitch",
        "--nics",
        "1 x edr",
        "-o",
        "v.toml",
    ];
    let call: Vec<&str> = ["cluster", "import", "sinfo"].into_iter().chain(given).collect();
    scratch.run(&call).done();
    let shown = scratch.run(&["cluster", "show", "v.toml"]).done();
    assert!(
        shown.stdout.contains("4 nodes alike: n01, n02, n03, n04"),
        "{shown}"
    );
}

#[test]
fn contradictions_name_both_places() {
    let scratch = Scratch::new(program());
    scratch.write("topo", TOPOLOGY);
    scratch.write(
        "list",
        format!("{LIST}GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-cc)\n"),
    );
    let answer = scratch.run(&["cluster", "import", "topo", "list", "--json"]);
    assert_eq!(answer.code, Some(1), "{answer}");
    let problem = &answer.json()[1]["problems"][0];
    assert_eq!(problem["line"], json!(3), "{answer}");
    assert!(problem["what"].as_str().unwrap().contains("topo:2"), "{answer}");
    scratch.write(
        "table",
        LIST.replace("A100-SXM4-80GB (UUID: GPU-bb", "H100 PCIe (UUID: GPU-bb"),
    );
    scratch.write("list", LIST);
    let answer = scratch.run(&["cluster", "import", "list", "table", "--json"]);
    let problem = &answer.json()[1]["problems"][0]["what"];
    assert!(problem.as_str().unwrap().contains("list:2"), "{answer}");
}

/// A file that is no dump, with what its refusal says.
fn hostile() -> Vec<(&'static str, Vec<u8>, Vec<&'static str>)> {
    let bomb: String = (1..10).fold(String::new(), |mut text, level| {
        let _ = writeln!(
            text,
            "<!ENTITY lol{level} \"{}\">",
            format!("&lol{};", level - 1).repeat(10)
        );
        text
    });
    let bomb = format!(
        "<?xml version=\"1.0\"?>\n<!DOCTYPE nvidia_smi_log [\n<!ENTITY lol0 \"lol\">\n{bomb}]>\n<nvidia_smi_log>&lol9;</nvidia_smi_log>\n"
    );
    let aliases = "apiVersion: v1\na: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nkind: Node\n";
    let wide: Vec<u8> = LIST.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let marked: Vec<u8> = [&b"\xff\xfe"[..], &wide].concat();
    let looped = "<system version=\"1\"><cpu><pci busid=\"a\" class=\"0x060400\"><pci busid=\"b\" class=\"0x060400\">\
        <pci busid=\"a\" class=\"0x030200\"/></pci></pci></cpu></system>";
    let parents = "<system version=\"1\"><cpu><pci busid=\"a\" parent=\"b\"/><pci busid=\"b\" parent=\"a\"/></cpu></system>";
    let text = |text: &str| text.as_bytes().to_vec();
    let many_columns = format!(
        "\t{}\n",
        (0..2_000).map(|gpu| format!("GPU{gpu}\t")).collect::<String>()
    );
    vec![
        (
            "entities",
            bomb.into_bytes(),
            vec!["entities", "write the values out"],
        ),
        (
            "external",
            text("<!DOCTYPE system [<!ENTITY x SYSTEM \"file:///etc/passwd\">]><system>&x;</system>"),
            vec!["entities"],
        ),
        ("aliases", text(aliases), vec!["aliases"]),
        ("deep.json", text(&"[".repeat(100_000)), vec!["fix:"]),
        ("deep map", text(&"{\"a\":".repeat(5_000)), vec!["fix:"]),
        (
            "deep.yaml",
            text(&format!("apiVersion: {}", "[".repeat(100_000))),
            vec!["fix:"],
        ),
        (
            "deep.xml",
            text(&format!("<system version=\"1\">{}", "<cpu>".repeat(10_000))),
            vec!["deeper than"],
        ),
        (
            "range",
            text("NODELIST GRES\nn[0-1099511627775] gpu:8\n"),
            vec!["range:2", "65536 hosts"],
        ),
        (
            "ranges",
            text("NODELIST GRES\na[1-60000]b[1-60000] gpu:8\n"),
            vec!["hosts"],
        ),
        (
            "digits",
            text(&format!("NODELIST GRES\nn[1-{}] gpu:8\n", "9".repeat(500))),
            vec!["hosts"],
        ),
        (
            "slurm.conf",
            text("NodeName=n[0-4294967295] Gres=gpu:8\n"),
            vec!["hosts"],
        ),
        (
            "count",
            text("NODES GRES PARTITION\n99999999999 gpu:8 all\n"),
            vec!["hosts"],
        ),
        (
            "page",
            text("<!DOCTYPE html>\n<html><body><pre>GPU0</pre></body></html>\n"),
            vec!["HTML", "plain text"],
        ),
        ("page2", text("\n  <HTML><head></head></HTML>\n"), vec!["HTML"]),
        ("wide", marked, vec!["UTF-16", "iconv"]),
        ("wide2", wide, vec!["UTF-16", "iconv"]),
        (
            "wide4",
            [&b"\xff\xfe\0\0"[..], b"G\0\0\0"].concat(),
            vec!["UTF-32"],
        ),
        (
            "pointer",
            text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n"),
            vec!["LFS", "git lfs pull"],
        ),
        ("loop.xml", text(looped), vec!["lies below itself"]),
        ("parents.xml", text(parents), vec!["lies below itself"]),
        ("zeros", text("GPU 0: a\0b (UUID: GPU-0)\n"), vec!["zero"]),
        (
            "gzip",
            [&b"\x1f\x8b\x08\0"[..], &[0; 40]].concat(),
            vec!["gzip", "unpacked"],
        ),
        (
            "program",
            [&b"\x7fELF\x02\x01\x01\0"[..], &[0; 40]].concat(),
            vec!["a program"],
        ),
        ("empty", Vec::new(), vec!["empty"]),
        ("blank", text("  \n\t\n"), vec!["empty"]),
        (
            "prose",
            text("Dear all,\nthe machine has eight GPUs.\n"),
            vec!["no known kind", "nvidia-smi"],
        ),
        (
            "other.json",
            text("{\"model_type\": \"llama\"}\n"),
            vec!["JSON", "model_type"],
        ),
        (
            "other.xml",
            text("<project><modules/></project>"),
            vec!["XML", "<project>"],
        ),
        ("long", vec![b' '; (16 << 20) + 1], vec!["at most", "one command"]),
        (
            "adapters",
            text(
                &(0..500)
                    .map(|adapter| format!("CA 'mlx5_{adapter}'\n"))
                    .collect::<String>(),
            ),
            vec!["256 adapters"],
        ),
        (
            "elements",
            text(&format!("<system version=\"1\">{}", "<cpu/>".repeat(150_000))),
            vec!["100000 XML elements"],
        ),
        (
            "values",
            text(&format!("{{\"apiVersion\": [{}1]}}", "1,".repeat(400_000))),
            vec!["values"],
        ),
        ("columns", text(&many_columns), vec![]),
    ]
}

#[test]
fn hostile_files_are_refused_with_what_to_do() {
    let scratch = Scratch::new(program());
    let mut refused = 0;
    for (name, content, needles) in hostile() {
        scratch.write(name, content);
        let answer = scratch.run(&["cluster", "import", name, "--json"]);
        if needles.is_empty() {
            // Recognised, but nothing of it is whole.
            assert_eq!(answer.code, Some(1), "{name}");
            continue;
        }
        answer.refused(&needles);
        assert!(answer.stderr.contains(name), "{name} is not named: {answer}");
        refused += 1;
    }
    assert!(refused >= 30, "only {refused} files were refused");
}

#[test]
fn what_is_no_file_is_refused() {
    let scratch = Scratch::new(program());
    std::fs::create_dir(scratch.path().join("folder")).unwrap();
    std::os::unix::fs::symlink("loop", scratch.path().join("loop")).unwrap();
    let sparse = std::fs::File::create(scratch.path().join("sparse")).unwrap();
    sparse.set_len(5 << 30).unwrap();
    for (name, needle) in [
        ("folder", "is a directory"),
        ("loop", "loop"),
        ("sparse", "at most"),
        ("absent", "absent"),
    ] {
        scratch.run(&["cluster", "import", name]).refused(&[needle]);
    }
}
