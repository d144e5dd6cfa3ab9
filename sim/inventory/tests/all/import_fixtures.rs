//! Dumps as tools write them, made here: each of a host or cluster whose parts are known.

/// A good dump.
pub(crate) struct Good {
    /// What its kind is called.
    pub(crate) kind: &'static str,
    pub(crate) text: String,
    /// Whether its own counters or brackets tell when it is cut, wherever that is.
    pub(crate) announces: bool,
    /// Whether rows may stand in any order, one a line.
    pub(crate) has_rows: bool,
}

fn good(kind: &'static str, text: impl Into<String>, announces: bool, has_rows: bool) -> Good {
    Good {
        kind,
        text: text.into(),
        announces,
        has_rows,
    }
}

/// One of each kind.
pub(crate) fn all() -> Vec<Good> {
    vec![
        good("topo-m", topo_matrix(), true, true),
        good("smi-L", list(), false, true),
        good("nvlink-s", nvlinks(), false, false),
        good("smi-table", table(), false, false),
        good("query-csv", csv(), true, true),
        good("smi-xml", smi_xml(), true, false),
        good("nccl-xml", nccl_xml(), true, false),
        good("nccl-tests", nccl_tests(), true, true),
        good("nvbandwidth", nvbandwidth(), false, false),
        good("ibstat", ibstat(), false, false),
        good("ibv-devinfo", ibv_devinfo(), false, false),
        good("slurm-sinfo", SINFO, false, true),
        good("slurm-node", SCONTROL, false, false),
        good("k8s-node", kubernetes_json(), true, false),
        good("k8s-node", KUBERNETES_YAML, false, false),
        good("gfd-labels", LABELS, false, true),
        good("ray-status", RAY, true, false),
        good("worker-json", worker(), true, false),
    ]
}

pub(crate) fn topo_matrix() -> String {
    let names = ["GPU0", "GPU1", "GPU2", "GPU3", "NIC0", "NIC1"];
    let cell = |a: usize, b: usize| match (a.min(b), a.max(b)) {
        _ if a == b => " X ",
        (0..4, 0..4) => "NV4",
        (gpu @ 0..4, nic) if gpu / 2 == nic - 4 => "PXB",
        _ => "SYS",
    };
    let mut text = format!(
        "\t{}\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n",
        names.join("\t")
    );
    for (row, name) in names.iter().enumerate() {
        let cells: Vec<&str> = (0..names.len()).map(|column| cell(row, column)).collect();
        let affinity = if row < 4 {
            format!("\t{}-{}\t{}\t\tN/A", row * 16, row * 16 + 15, row / 2)
        } else {
            String::new()
        };
        text.push_str(&format!("{name}\t{}{affinity}\n", cells.join("\t")));
    }
    text.push_str(
        "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n",
    );
    text.push_str("  NV#  = Connection traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n");
    text
}

pub(crate) fn list() -> String {
    let line = |gpu: u32| {
        format!("GPU {gpu}: NVIDIA A100-SXM4-40GB (UUID: GPU-5f1c9b0{gpu}-77aa-4c1e-9d10-0242ac12000{gpu})\n")
    };
    (0..4).map(line).collect()
}

pub(crate) fn nvlinks() -> String {
    let links: String = (0..12).map(|link| format!("\t Link {link}: 25 GB/s\n")).collect();
    list().lines().map(|line| format!("{line}\n{links}")).collect()
}

pub(crate) fn table() -> String {
    let rule =
        "+-----------------------------------------+------------------------+----------------------+\n";
    let mut text = format!(
        "Tue Mar  3 10:00:00 2026       \n+{0}+\n| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |\n{rule}\
         | GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n\
         | Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n\
         |                                         |                        |               MIG M. |\n\
         |=========================================+========================+======================|\n",
        "-".repeat(89)
    );
    for gpu in 0..4 {
        text.push_str(&format!(
            "|   {gpu}  NVIDIA A100-SXM4-40GB          On  |   00000000:0{}:00.0 Off |                    0 |\n\
             | N/A   31C    P0             45W /  400W |       0MiB /  40960MiB |      0%      Default |\n\
             |                                         |                        |             Disabled |\n{rule}",
            gpu + 1
        ));
    }
    text.push_str(
        "\n| Processes:                                                                              |\n",
    );
    text.push_str(
        "|  No running processes found                                                             |\n",
    );
    text
}

pub(crate) fn csv() -> String {
    let row = |gpu: u32| {
        format!(
            "{gpu}, 4, NVIDIA A100-SXM4-40GB, 00000000:0{}:00.0, [N/A], 4, 16, 40960 MiB\n",
            gpu + 1
        )
    };
    let rows: String = (0..4).map(row).collect();
    format!(
        "index, count, name, pci.bus_id, fan.speed [%], pcie.link.gen.max, pcie.link.width.max, memory.total [MiB]\n{rows}"
    )
}

pub(crate) fn smi_xml() -> String {
    let gpu = |gpu: u32| {
        format!(
            "\t<gpu id=\"00000000:0{0}:00.0\">\n\t\t<product_name>NVIDIA A100-SXM4-40GB</product_name>\n\
             \t\t<pci>\n\t\t\t<pci_device_id>20B010DE</pci_device_id>\n\t\t</pci>\n\
             \t\t<fb_memory_usage>\n\t\t\t<total>40960 MiB</total>\n\t\t</fb_memory_usage>\n\t</gpu>\n",
            gpu + 1
        )
    };
    let gpus: String = (0..4).map(gpu).collect();
    format!(
        "<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v12.dtd\">\n<nvidia_smi_log>\n\
         \t<driver_version>550.54.15</driver_version>\n\t<attached_gpus>4</attached_gpus>\n{gpus}</nvidia_smi_log>\n"
    )
}

pub(crate) fn nccl_xml() -> String {
    let mut text = "<system version=\"1\">\n".to_owned();
    for socket in 0..2 {
        text.push_str(&format!(
            "  <cpu numaid=\"{socket}\" affinity=\"ffff\" arch=\"x86_64\">\n"
        ));
        text.push_str(&format!(
            "    <pci busid=\"0000:{socket}0:00.0\" class=\"0x060400\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\">\n"
        ));
        for gpu in [socket * 2, socket * 2 + 1] {
            text.push_str(&format!(
                "      <pci busid=\"0000:0{}:00.0\" class=\"0x030200\" vendor=\"0x10de\" device=\"0x20b0\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\">\n        <gpu dev=\"{gpu}\" sm=\"80\" rank=\"{gpu}\" gdr=\"1\">\n",
                gpu + 1
            ));
            for other in (0..4).filter(|other| *other != gpu) {
                text.push_str(&format!(
                    "          <nvlink target=\"0000:0{}:00.0\" count=\"4\" tclass=\"0x030200\"/>\n",
                    other + 1
                ));
            }
            text.push_str("        </gpu>\n      </pci>\n");
        }
        text.push_str(&format!(
            "      <pci busid=\"0000:{socket}9:00.0\" class=\"0x020700\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\">\n        <nic>\n          <net name=\"mlx5_{socket}\" dev=\"{socket}\" speed=\"200000\" port=\"1\" gdr=\"1\"/>\n        </nic>\n      </pci>\n    </pci>\n  </cpu>\n"
        ));
    }
    text + "</system>\n"
}

pub(crate) fn nccl_tests() -> String {
    let ranks: String = (0..4)
        .map(|rank| {
            format!(
                "#   Rank  {rank} Pid   4711 on   hostx device  {rank} [0x0{rank}] NVIDIA A100-SXM4-40GB\n"
            )
        })
        .collect();
    let rows: String = (0..6)
        .map(|step| {
            let size = 1024_u64 << (2 * step);
            format!("{size:>12} {:>13}     float     sum      -1    20.0    5.00    7.50      0    20.0    5.00    7.50      0\n", size / 4)
        })
        .collect();
    format!(
        "# nThread 1 nGpus 4 minBytes 1024 maxBytes 1048576 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0\n#\n# Using devices\n{ranks}#\n#                                                              out-of-place                       in-place          \n#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       \n{rows}# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 7.5\n#\n"
    )
}

pub(crate) fn nvbandwidth() -> String {
    "nvbandwidth Version: v0.6\nBuilt from Git version: v0.6\n\nCUDA Runtime Version: 12040\n\n\
     Device 0: NVIDIA A100-SXM4-40GB (00000000:01:00)\nDevice 1: NVIDIA A100-SXM4-40GB (00000000:02:00)\n\n\
     Running device_to_device_memcpy_read_ce.\nmemcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)\n\
     \x20          0         1\n 0       N/A     93.50\n 1     93.25       N/A\n\nSUM device_to_device_memcpy_read_ce 186.75\n"
        .to_owned()
}

pub(crate) fn ibstat() -> String {
    let adapter = |adapter: u32| {
        format!(
            "CA 'mlx5_{adapter}'\n\tCA type: MT4123\n\tNumber of ports: 1\n\tFirmware version: 20.31.1014\n\tHardware version: 0\n\tNode GUID: 0x043f7203000{adapter}\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n\t\tRate: 200\n\t\tBase lid: {}\n\t\tLMC: 0\n\t\tSM lid: 1\n\t\tPort GUID: 0x043f7203000{adapter}\n\t\tLink layer: InfiniBand\n",
            adapter + 7
        )
    };
    (0..2).map(adapter).collect()
}

pub(crate) fn ibv_devinfo() -> String {
    let adapter = |adapter: u32| {
        format!(
            "hca_id:\tmlx5_{adapter}\n\ttransport:\t\t\tInfiniBand (0)\n\tfw_ver:\t\t\t\t20.31.1014\n\tnode_guid:\t\t\t043f:7203:0000:000{adapter}\n\tphys_port_cnt:\t\t\t1\n\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n\t\t\tmax_mtu:\t\t4096 (5)\n\t\t\tactive_mtu:\t\t4096 (5)\n\t\t\tsm_lid:\t\t\t1\n\t\t\tport_lid:\t\t{}\n\t\t\tport_lmc:\t\t0x00\n\t\t\tlink_layer:\t\tInfiniBand\n\t\t\tactive_width:\t\t4X (2)\n\t\t\tactive_speed:\t\t50.0 Gbps (64)\n\n",
            adapter + 7
        )
    };
    (0..2).map(adapter).collect()
}

pub(crate) const SINFO: &str = "NODELIST         GRES                     CPUS   MEMORY\n\
    gpu[01-03]       gpu:a100:4(S:0-1)        64     515000\n\
    gpu04            gpu:a100:4(S:0-1)        64     515000\n\
    gpu[05,07]       gpu:a100:4(S:0-1)        64     515000\n";

pub(crate) const SCONTROL: &str = "NodeName=gpu01 Arch=x86_64 CoresPerSocket=32 \n\
    \x20  CPUAlloc=0 CPUTot=64 CPULoad=0.10\n   AvailableFeatures=(null)\n   Gres=gpu:a100:4(S:0-1)\n\
    \x20  NodeAddr=gpu01 NodeHostName=gpu01 Version=23.02.6\n   RealMemory=515000 AllocMem=0 Sockets=2 Boards=1\n\
    \x20  State=IDLE ThreadsPerCore=1\n   CfgTRES=cpu=64,mem=515000M,billing=64,gres/gpu=4\n\n\
    NodeName=gpu02 Arch=x86_64 CoresPerSocket=32 \n   Gres=gpu:a100:4(S:0-1)\n\
    \x20  CfgTRES=cpu=64,mem=515000M,billing=64,gres/gpu=4\n   AllocTRES=\n";

pub(crate) fn kubernetes_json() -> String {
    let node = |node: u32| {
        format!(
            "    {{\n      \"kind\": \"Node\",\n      \"metadata\": {{\n        \"name\": \"gpu0{node}\",\n        \"labels\": {{\n          \"nvidia.com/gpu.product\": \"NVIDIA-A100-SXM4-40GB\",\n          \"nvidia.com/gpu.count\": \"4\"\n        }}\n      }},\n      \"status\": {{\n        \"capacity\": {{\n          \"cpu\": \"64\",\n          \"nvidia.com/gpu\": \"4\"\n        }}\n      }}\n    }}"
        )
    };
    let nodes: Vec<String> = (1..3).map(node).collect();
    format!(
        "{{\n  \"apiVersion\": \"v1\",\n  \"items\": [\n{}\n  ],\n  \"kind\": \"List\"\n}}\n",
        nodes.join(",\n")
    )
}

pub(crate) const KUBERNETES_YAML: &str = "apiVersion: v1\nkind: Node\nmetadata:\n  name: gpu01\n  labels:\n\
    \x20   kubernetes.io/hostname: gpu01\n    nvidia.com/gpu.count: \"4\"\n\
    \x20   nvidia.com/gpu.memory: \"40960\"\n    nvidia.com/gpu.product: NVIDIA-A100-SXM4-40GB\n\
    status:\n  addresses:\n  - address: 192.0.2.7\n    type: InternalIP\n  allocatable:\n    cpu: \"64\"\n\
    \x20   nvidia.com/gpu: \"4\"\n  capacity:\n    cpu: \"64\"\n    memory: 527360000Ki\n    nvidia.com/gpu: \"4\"\n";

pub(crate) const LABELS: &str = "nvidia.com/cuda.driver.major=550\nnvidia.com/gpu.compute.major=8\n\
    nvidia.com/gpu.count=4\nnvidia.com/gpu.family=ampere\nnvidia.com/gpu.memory=40960\n\
    nvidia.com/gpu.product=NVIDIA-A100-SXM4-40GB\nnvidia.com/gpu.replicas=1\n";

pub(crate) const RAY: &str = "======== Autoscaler status: 2026-03-03 10:00:00.000000 ========\nNode status\n\
    ---------------------------------------------------------------\nActive:\n 1 node_aa11\n 1 node_bb22\nPending:\n (no pending nodes)\n\
    Recent failures:\n (no failures)\n\nResources\n---------------------------------------------------------------\nUsage:\n\
    \x200.0/128.0 CPU\n 0.0/8.0 GPU\n 0.0/2.0 accelerator_type:A100\n 0B/900.00GiB memory\n 0B/300.00GiB object_store_memory\n\nDemands:\n (no resource demands)\n";

pub(crate) fn worker() -> String {
    let device = |device: u32| {
        format!(
            "        {{\n          \"name\": \"NVIDIA A100-SXM4-40GB\",\n          \"uuid\": \"GPU-5f1c9b0{device}\",\n          \"vendor\": \"nvidia\",\n          \"index\": {device},\n          \"memory\": {{\"total\": 42949672960, \"used\": 0}}\n        }}"
        )
    };
    let devices: Vec<String> = (0..4).map(device).collect();
    format!(
        "{{\n  \"name\": \"gpu01\",\n  \"status\": {{\n    \"gpu_devices\": [\n{}\n    ]\n  }},\n  \"id\": 3\n}}\n",
        devices.join(",\n")
    )
}
